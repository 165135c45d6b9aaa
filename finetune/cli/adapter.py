"""``finetune adapter``: what runs learned, put on models, taken off, exchanged, combined and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune.cli.options import AsJson
from finetune.cli.output import print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["VERBS"]

EXAMPLES = """
finetune adapter show runs/quickstart
finetune adapter apply bundled:smollm2-135m-instruct runs/quickstart tuned
finetune adapter switch tuned runs/quickstart runs/other tuned-other
finetune adapter fuse both runs/quickstart runs/other --weights 0.5,0.5
"""

Adapter = Annotated[Path, typer.Argument(help="Run directory, its final folder, or a learned state.")]
Model = Annotated[str, typer.Argument(help="Model folder, hub id or bundled model.")]
Out = Annotated[Path, typer.Argument(help="Folder to write to; absent or empty.")]


def show(adapter: Adapter, as_json: AsJson = False) -> None:
    """Shows what was learned: tensors, entries, and how far they moved."""
    from finetune.adapters.learned import read_learned

    learned = read_learned(_folder(adapter))
    rows = [
        {
            "tensor": name,
            "entries": tensor.value.numel(),
            "form": "entries" if tensor.axis is None else f"slices along axis {tensor.axis}",
            "norm of change": float(tensor.change.norm()),
        }
        for name, tensor in learned.tensors.items()
    ]
    about = {key: learned.metadata.get(key) for key in ("method", "base_model", "base_fingerprint", "config")}
    if as_json:
        print_json({**about, "tensors": rows})
        return
    entries = sum(tensor.value.numel() for tensor in learned.tensors.values())
    print(f"{about['method']} on {about['base_model']}: {entries:,} entries of {len(rows)} tensors")
    cells = [
        [str(row["tensor"]), f"{row['entries']:,}", str(row["form"]), f"{row['norm of change']:.4g}"] for row in rows
    ]
    print_table(cells, ["tensor", "entries", "form", "norm of change"])


def apply(base: Model, adapter: Adapter, out: Out) -> None:
    """Writes the base with what was learned to OUT, as a plain model."""
    from finetune.adapters import apply as put_on

    _write(base, out, lambda model: put_on(model, _folder(adapter)), adapter)


def unapply(model: Model, adapter: Adapter, out: Out) -> None:
    """Writes the model without what was learned to OUT: the base again, bit for bit."""
    from finetune.adapters import unapply as take_off

    _write(model, out, lambda loaded: take_off(loaded, _folder(adapter)), adapter)


def switch(model: Model, old: Adapter, new: Adapter, out: Out) -> None:
    """Writes the model with NEW in place of OLD to OUT."""
    from finetune.adapters import switch as exchange

    _write(model, out, lambda loaded: exchange(loaded, _folder(old), _folder(new)), old, new)


def fuse(
    out: Out,
    adapters: Annotated[list[Path], typer.Argument(help="Two or more run directories or learned states.")],
    weights: Annotated[
        str | None, typer.Option("--weights", help="One number per adapter, with commas; 1 each where not given.")
    ] = None,
) -> None:
    """Writes the weighted sum of what several runs learned to OUT, as a learned state."""
    from finetune.adapters import fuse as combine

    numbers = _numbers(weights, len(adapters))
    print(combine(list(zip(map(_folder, adapters), numbers, strict=True)), out))


def diff(first: Adapter, second: Adapter, as_json: AsJson = False) -> None:
    """Compares what two runs learned: what only one has, what both have, and how far apart they are there."""
    from dataclasses import asdict

    from finetune.adapters import diff as compare

    result = compare(_folder(first), _folder(second))
    if as_json:
        print_json(asdict(result))
        return
    rows = [
        [
            tensor.name or "total",
            *(f"{count:,}" for count in (tensor.only_first, tensor.only_second, tensor.both)),
            *(f"{size:.4g}" for size in (tensor.largest, tensor.mean, tensor.first_norm, tensor.second_norm)),
        ]
        for tensor in (*result.tensors, result.total)
    ]
    headers = ["tensor", "only first", "only second", "both", "largest gap", "mean gap", "first norm", "second norm"]
    print_table(rows, headers)


def _folder(adapter: Path) -> Path:
    from finetune.models.tuned import state_folder

    return state_folder(adapter)


def _write(name: str, out: Path, change: Callable[[Any], Any], *adapters: Path) -> None:
    """Writes the changed model in the dtype that it is stored in, with its tokenizer; untied as it was trained."""
    from finetune.adapters.learned import read_learned
    from finetune.core.files import replaced_folder, require_empty
    from finetune.core.fingerprint import is_tied
    from finetune.models import load_config, load_model, load_tokenizer

    require_empty(out)
    untied = any(read_learned(_folder(adapter)).metadata.get("tied") is False for adapter in adapters)
    dtype = str(load_config(name).dtype or "float32").removeprefix("torch.")
    model = load_model(name, dtype=dtype, device="cpu", tied="untie" if untied else "keep")
    tokenizer = load_tokenizer(name)
    change(model)
    # Before the save, so that loading does not tie two heads that differ.
    model.config.tie_word_embeddings = is_tied(model)
    with replaced_folder(out) as beside:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
    print(out)


def _numbers(weights: str | None, count: int) -> list[float]:
    from finetune.core.errors import ConfigError

    if weights is None:
        return [1.0] * count
    try:
        numbers = [float(number) for number in weights.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise ConfigError(
            "the weights do not fit the adapters",
            where="--weights",
            got=weights,
            want=f"{count} numbers with commas between them",
            fix="--weights " + ",".join([f"{1 / count:.2g}"] * count),
        )
    return numbers


VERBS: dict[str, Callable[..., None]] = {
    "show": show,
    "apply": apply,
    "unapply": unapply,
    "switch": switch,
    "fuse": fuse,
    "diff": diff,
}
