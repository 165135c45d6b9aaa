"""``finetune chat``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.options import Base, MaxNewTokens, Target, TrainedTask

if TYPE_CHECKING:
    from finetune.evaluation.chat import ChatSession

EXAMPLES = """
finetune chat runs/quickstart
finetune chat bundled:smollm2-135m-instruct --message "What is a crontab?"
"""

_HELP = "/reset forgets what was said, /quit or the end of input leaves"


def chat(
    target: Target,
    message: Annotated[str | None, typer.Option("-m", "--message", help="Answer this one message and leave.")] = None,
    base: Base = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    task: TrainedTask = None,
) -> None:
    """Talks to a model; without a terminal, every line of the input is a message."""
    from finetune.evaluation.chat import ChatSession

    session = ChatSession(target, base=base, system=system, max_new_tokens=max_new_tokens, task=task)
    if message is not None:
        _answer(session, message)
        return
    if sys.stdin.isatty():
        print(_HELP, file=sys.stderr)
    while (line := _next_line()) not in (None, "/quit"):
        if line == "/reset":
            session.reset()
        elif line:
            _answer(session, line)


def _next_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _answer(session: ChatSession, message: str) -> None:
    try:
        for piece in session.reply(message):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        # Whoever stops reading stops the generation; the conversation goes on.
    print()
