"""The command line's entry point: verbs, exit codes, and what is said when something goes wrong."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import typer

from finetune.cli import (
    adapter,
    cat,
    chat,
    cp,
    data_inspect,
    env,
    estimate,
    evaluate,
    export,
    ls,
    merge,
    reflect,
    scan,
    search,
    select,
    train,
    validate,
    version,
)
from finetune.cli.launch import lost_a_process
from finetune.cli.output import WarningList, print_error
from finetune.cli.settings import COMMON_OPTIONS, Settings
from finetune.core.errors import FinetuneError, list_choices, nearest

__all__ = ["main"]

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130
_WRONG_PATHS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_FREE_FORM = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Of verbs that take overrides: what is no option of theirs is left to finetune.config."""

_VERBS: dict[str, tuple[Callable[..., Any], bool]] = {
    "train": (train.train, True),
    "validate": (validate.validate, True),
    "estimate": (estimate.estimate, True),
    "search": (search.search, True),
    "select": (select.select, True),
    "reflect": (reflect.reflect, True),
    "eval": (evaluate.evaluate, False),
    "chat": (chat.chat, False),
    "merge": (merge.merge, False),
    "export": (export.export, False),
    "scan": (scan.scan, False),
    "ls": (ls.ls, False),
    "cp": (cp.cp, False),
    "cat": (cat.cat, False),
    "env": (env.env, False),
    "version": (version.version, False),
}

_GROUPS = ("data", "adapter")
"""Verbs that have verbs of their own."""


def _epilog(examples: str) -> str:
    return "\n\n".join(["Examples:", *examples.strip().splitlines(), COMMON_OPTIONS])


def _build() -> typer.Typer:
    plain: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
    options: dict[str, Any] = {
        "add_completion": False,
        "context_settings": plain,
        "pretty_exceptions_enable": False,
        "rich_markup_mode": None,
    }
    app = typer.Typer(
        name="finetune",
        help="Fine-tunes language models with little memory.",
        epilog=_epilog("finetune train quickstart\nfinetune ls methods"),
        **options,
    )
    data = typer.Typer(name="data", help="Looks into the data that a recipe trains on.", **options)
    for name, (verb, free_form) in _VERBS.items():
        _add(app, name, verb, plain | _FREE_FORM if free_form else plain)
    _add(data, "inspect", data_inspect.inspect, plain | _FREE_FORM)
    app.add_typer(data)
    adapters = typer.Typer(name="adapter", help="Puts what runs learned on models, takes it off.", **options)
    for name, verb in adapter.VERBS.items():
        _add(adapters, name, verb, plain)
    app.add_typer(adapters)
    return app


def _add(app: typer.Typer, name: str, verb: Callable[..., Any], settings: dict[str, Any]) -> None:
    examples = sys.modules[verb.__module__].EXAMPLES
    app.command(name, epilog=_epilog(examples), context_settings=settings)(verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 done, 1 failed, 2 wrong input, 3 refused, 130 interrupted."""
    settings = Settings.read(sys.argv[1:] if arguments is None else arguments)
    warning_list = WarningList(others=settings.debug)
    warning_list.install()
    if settings.debug:
        logging.basicConfig(level=logging.DEBUG)
    else:
        _quiet_libraries()
    try:
        code = _run(settings)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has had enough; nothing may be written to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        return _report(error, settings)
    finally:
        if settings.rank == 0:
            warning_list.print_again()


def _quiet_libraries() -> None:
    """Leaves the talking to us; set before the libraries are imported, and what the user has set stays."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _run(settings: Settings) -> int:
    arguments = settings.arguments or ["--help"]
    if arguments[0] == "--version":
        arguments = ["version"]
    verbs = [*_VERBS, *_GROUPS]
    if not arguments[0].startswith("-") and arguments[0] not in verbs:
        raise FinetuneError(
            f"there is no verb {arguments[0]!r}", want=list_choices(verbs), near=nearest(arguments[0], verbs)
        )
    if arguments[0] == "train":
        arguments = train.with_resume_value(arguments)
    code = _build()(args=arguments, prog_name="finetune", standalone_mode=False, obj=settings)
    return code if isinstance(code, int) else 0


def _report(error: Exception, settings: Settings) -> int:
    if settings.debug:
        traceback.print_exception(error)
    ours, code = _as_ours(error, settings)
    print_error(ours, rank=settings.rank)
    return code


def _as_ours(error: Exception, settings: Settings) -> tuple[FinetuneError, int]:
    """Returns an error in our form, and its exit code."""
    if isinstance(error, FinetuneError):
        return error, error.exit_code
    if isinstance(error, typer.TyperException):
        in_group = settings.arguments[:1] and settings.arguments[0] in _GROUPS
        verb = " ".join(settings.arguments[: 2 if in_group else 1])
        message = error.format_message().rstrip(".")
        return FinetuneError(message[:1].lower() + message[1:], fix=f"finetune {verb} --help"), WRONG_INPUT
    if isinstance(error, OSError) and error.strerror:
        what = error.strerror[0].lower() + error.strerror[1:]
        wrong_path = isinstance(error, _WRONG_PATHS)
        return FinetuneError(what, where=str(error.filename or "")), WRONG_INPUT if wrong_path else FAILED
    if lost_a_process(error):
        return FinetuneError("another process of this run is gone", fix="look at what that one said"), FAILED
    fix = "" if settings.debug else "the same command with --debug shows where"
    what = f"unexpected {type(error).__name__}"
    return FinetuneError(what, got=" ".join(str(error).split()), fix=fix), FAILED
