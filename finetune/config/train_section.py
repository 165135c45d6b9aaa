"""The ``train`` section: ``transformers.TrainingArguments``, read from the source of the installed version."""

from __future__ import annotations

import functools
import re
from typing import Any, Literal

from pydantic import BaseModel, Field, create_model

from finetune.config.aliases import owned_elsewhere
from finetune.config.schema import Section
from finetune.core.errors import ConfigError
from finetune.core.source_fields import package_folder, read_enum_values, read_fields

__all__ = ["train_section"]

_ENUMS = {
    "OptimizerNames": "training_args.py",
    "DebugOption": "debug_utils.py",
    "HubStrategy": "trainer_utils.py",
    "IntervalStrategy": "trainer_utils.py",
    "SaveStrategy": "trainer_utils.py",
    "SchedulerType": "trainer_utils.py",
}
_AT_LEAST: dict[str, dict[str, Any]] = {
    "per_device_train_batch_size": {"ge": 1},
    "per_device_eval_batch_size": {"ge": 1},
    "gradient_accumulation_steps": {"ge": 1},
    "num_train_epochs": {"gt": 0},
    "learning_rate": {"ge": 0},
    "warmup_steps": {"ge": 0},
    "weight_decay": {"ge": 0},
    "max_grad_norm": {"ge": 0},
    "logging_steps": {"gt": 0},
    "save_steps": {"gt": 0},
    "save_total_limit": {"ge": 1},
}
"""Bounds that transformers does not check, or checks after the model is loaded."""


@functools.cache
def train_section() -> type[BaseModel]:
    """Returns a model with the fields of TrainingArguments but those that other sections own.

    Raises:
        ConfigError: transformers is not installed.
    """
    folder = package_folder("transformers")
    if folder is None:
        raise ConfigError("transformers is not installed", fix="pip install transformers")
    enums = {name: read_enum_values(folder / file, name) for name, file in _ENUMS.items()}
    # transformers accepts the text of an enum's member and no other text.
    or_text = re.compile(rf"\b({'|'.join(enums)}) \| str\b")
    elsewhere = owned_elsewhere("train")
    fields: dict[str, Any] = {
        field.name: (
            or_text.sub(r"\1", field.annotation),
            Field(default=field.default, description=field.help, **_AT_LEAST.get(field.name, {})),
        )
        for field in read_fields(folder / "training_args.py", "TrainingArguments").values()
        if field.name not in elsewhere
    }
    model = create_model("TrainSection", __base__=Section, __module__=__name__, **fields)
    model.__doc__ = "transformers.TrainingArguments, field by field."
    model.model_rebuild(
        _types_namespace={"Any": Any, "Literal": Literal, **{name: Literal[values] for name, values in enums.items()}}
    )
    return model
