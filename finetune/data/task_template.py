"""Rows of a labelled data set put into words: a prompt, and answers of which one is right.

What a row asks decides much of what few steps can learn: the answers should be what the model might say anyway.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from finetune.core.errors import list_choices, nearest
from finetune.data.jsonlines import BadRowError

__all__ = ["TASK_TEMPLATES", "NamedTemplate", "TaskTemplate"]

_COLUMN = re.compile(r"\{(\w+)\}")


class TaskTemplate(BaseModel):
    """How a row becomes a question with options."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt: str = Field(description="What is asked, with {column} for what a row has in it.")
    label: str = Field(default="label", description="Column that says which answer is right.")
    answers: list[str] | dict[str, str] = Field(
        description="The answers: in the order of labels 0, 1, ..., or by the label's name."
    )

    @field_validator("prompt")
    @classmethod
    def _asks_something(cls, prompt: str) -> str:
        if not _COLUMN.search(prompt):
            raise ValueError("a prompt that names a column, as '{sentence} It was' does")
        return prompt

    @field_validator("answers")
    @classmethod
    def _leaves_a_choice(cls, answers: list[str] | dict[str, str]) -> list[str] | dict[str, str]:
        texts = list(answers.values()) if isinstance(answers, dict) else answers
        if len(set(texts)) < 2 or len(set(texts)) < len(texts):
            raise ValueError("two or more answers, each another text")
        return answers

    def words(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the row as ``prompt``, ``completion`` and ``choices``, with its other columns.

        Raises:
            BadRowError: A column is missing, or the label has no answer.
        """
        named = _COLUMN.findall(self.prompt)
        missing = [column for column in (*named, self.label) if row.get(column) is None]
        if missing:
            raise BadRowError("a column is missing", f"{missing[0]!r} of data.template; the row has {', '.join(row)}")
        prompt = _COLUMN.sub(lambda found: str(row[found[1]]).strip(), self.prompt)
        choices = list(self.answers.values()) if isinstance(self.answers, dict) else self.answers
        others = {name: value for name, value in row.items() if name not in (*named, self.label)}
        return {**others, "prompt": prompt, "completion": self._answer(row[self.label]), "choices": choices}

    def _answer(self, label: Any) -> str:
        if isinstance(self.answers, dict):
            answer = self.answers.get(str(label))
        else:
            # A CSV file has its numbers as text.
            place = int(label) if isinstance(label, int) or (isinstance(label, str) and label.isdecimal()) else -1
            answer = self.answers[place] if 0 <= place < len(self.answers) else None
        if answer is None:
            labels = list(self.answers) if isinstance(self.answers, dict) else range(len(self.answers))
            raise BadRowError("the label has no answer", f"{label!r}; data.template has {', '.join(map(str, labels))}")
        return answer


TASK_TEMPLATES = {
    "sst2": TaskTemplate(prompt="{sentence} It was", answers=[" terrible", " great"]),
    "boolq": TaskTemplate(prompt="{passage}\n{question}?", label="answer", answers=[" No", " Yes"]),
    "rte": TaskTemplate(prompt="{premise}\nSo {hypothesis} Is that right?", answers=[" Yes", " No"]),
}
"""Templates by the name of the data set whose columns they name."""


def _by_name(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in TASK_TEMPLATES:
        near = nearest(value, TASK_TEMPLATES)
        meant = f" (did you mean {near!r}?)" if near else ""
        known = list_choices(TASK_TEMPLATES)
        raise PydanticCustomError("template", "one of {known}, or prompt, label and answers" + meant, {"known": known})
    return TASK_TEMPLATES[value]


NamedTemplate = Annotated[
    TaskTemplate | None, BeforeValidator(_by_name, json_schema_input_type=str | TaskTemplate | None)
]
"""A template, or the name of a shipped one."""
