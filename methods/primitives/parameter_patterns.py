r"""One language to say which parameters of a model are meant.

==========================  ===========================================================================================
``model.layers.3.mlp``      a parameter, or all parameters of a module; whole components: layer 1 is not layer 10
``**.[qk]_proj``            a glob: ``*`` stays within a component, ``**`` goes over dots
``layers:8-15``             transformer layers: ``8-15``, ``25%-50%``, ``first 4``, ``last 4``
``attn``                    a kind: attn, mlp, norm, embed, head, bias, router, experts
``re:layers\.(2[0-9])\.``    a regular expression, searched in the name
==========================  ===========================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from finetune.core.errors import ConfigError, TargetError, list_choices, nearest
from finetune.methods.primitives.blocks import find_blocks

__all__ = ["KINDS", "all_names", "layer_range", "match_parameters", "parameter_kinds"]

KINDS = ("attn", "mlp", "norm", "embed", "head", "bias", "router", "experts")


def match_parameters(
    model: nn.Module, names: Iterable[str], patterns: Sequence[str], where: str
) -> dict[str, tuple[str, ...]]:
    """Returns by pattern the parameters among ``names`` that it means, in their order.

    Args:
        model: What they are parameters of; a shared one has its first name, and is found by its others too.
        names: Names of parameters.
        patterns: See the module.
        where: The recipe's key, for messages.

    Raises:
        ConfigError: A pattern is malformed.
        TargetError: A pattern matches nothing.
    """
    names = list(names)
    aliases = all_names(model)
    found = {}
    for pattern in patterns:
        fits = _matcher(model, pattern, where)
        matches = tuple(name for name in names if any(fits(alias) for alias in aliases[name]))
        if not matches:
            raise _no_match(pattern, names, where)
        found[pattern] = matches
    return found


def parameter_kinds(model: Any) -> dict[str, frozenset[str]]:
    """Returns by name of a parameter its kinds, of :data:`KINDS`, told from the structure of the model."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    ends = {id(p): "embed" for p in embedding.parameters()} if embedding is not None else {}
    head_ids = {id(p) for p in head.parameters()} if head is not None else set()
    try:
        place = find_blocks(model)[0] + "."
    except LookupError:
        place = ""
    kinds: dict[str, frozenset[str]] = {}
    for name, parameter in model.named_parameters():
        found = _kinds_of(model, name, place)
        found |= {ends[id(parameter)]} if id(parameter) in ends else set()
        found |= {"head"} if id(parameter) in head_ids else set()
        kinds[name] = frozenset(found)
    return kinds


def _kinds_of(model: nn.Module, name: str, place: str) -> set[str]:
    module, _, leaf = name.rpartition(".")
    found = {"bias"} if leaf.endswith("bias") else set()
    if "norm" in type(model.get_submodule(module)).__name__.lower():
        return found | {"norm"}
    if not place or not name.startswith(place):
        return found
    parts = name.removeprefix(place).split(".")[1:]
    if any("attn" in part or "attention" in part for part in parts):
        return found | {"attn"}
    found.add("mlp")
    if "experts" in parts:
        found.add("experts")
    elif parts[-2:-1] in (["gate"], ["router"]):
        found.add("router")
    return found


def layer_range(text: str, layers: int, where: str) -> range:
    """Returns the layers that ``8-15``, ``25%-50%``, ``first 4``, ``last 4`` or ``7`` means; both ends are in it.

    A percentage is a place between layers, rounded: of 30 layers, ``25%-50%`` is 8 to 14.

    Raises:
        ConfigError: It is none of these.
        TargetError: The model has not so many layers, or none is in the range.
    """
    text = text.strip()
    if match := re.fullmatch(r"(first|last) (\d+)", text):
        count = int(match[2])
        low, high = (0, count) if match[1] == "first" else (layers - count, layers)
    elif match := re.fullmatch(r"(\d+(?:\.\d+)?)%\s*-\s*(\d+(?:\.\d+)?)%", text):
        low, high = (_rounded(float(end) * layers / 100) for end in match.groups())
    elif match := re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", text):
        low, high = int(match[1]), int(match[2] or match[1]) + 1
    else:
        raise ConfigError(
            "not a range of layers", where=where, got=text, want="8-15, 25%-50%, first 4, last 4, or one number"
        )
    if not 0 <= low < high <= layers:
        raise TargetError(f"the model has layers 0 to {layers - 1}", where=where, got=text)
    return range(low, high)


def _rounded(place: float) -> int:
    return int(place + 0.5)


def _matcher(model: nn.Module, pattern: str, where: str) -> Callable[[str], bool]:
    if pattern.startswith("re:"):
        try:
            searched = re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise ConfigError("not a regular expression", where=where, got=pattern, want=str(error)) from error
        return lambda name: searched.search(name) is not None
    if pattern.startswith("layers:"):
        try:
            place, blocks = find_blocks(model)
        except LookupError as error:
            raise TargetError("the model has no transformer layers", where=where, got=str(error)) from error
        wanted = layer_range(pattern.removeprefix("layers:"), len(blocks), where)
        heads = tuple(f"{place}.{number}." for number in wanted)
        return lambda name: name.startswith(heads)
    if pattern in KINDS:
        kinds = parameter_kinds(model)
        return lambda name: pattern in kinds.get(name, ())
    glob = re.compile(_translated(pattern) + r"(\..*)?")
    return lambda name: glob.fullmatch(name) is not None


def _translated(pattern: str) -> str:
    """Returns the regular expression of a glob over dotted components."""
    pieces = re.split(r"(\*\*\.|\*\*|\*|\?|\[[^\]]*\])", pattern)
    special = {"**.": r"(?:.*\.)?", "**": ".*", "*": r"[^.]*", "?": r"[^.]"}
    return "".join(
        special.get(piece) or (piece.replace("[!", "[^") if piece.startswith("[") else re.escape(piece))
        for piece in pieces
    )


def all_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns by the first name of a parameter all its names: a shared one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {every[0]: tuple(every) for every in names.values()}


def _no_match(pattern: str, names: Sequence[str], where: str) -> TargetError:
    leaves = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdigit())
    near = nearest(pattern, list(names)) or nearest(pattern.rpartition(".")[2], [*leaves, *KINDS])
    return TargetError(
        f"{pattern!r} matches no parameter that may train", where=where, want=list_choices([*KINDS, *leaves]), near=near
    )
