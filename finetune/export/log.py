"""A zeroth-order run as its log: seeds and one number per direction and step, replayed on the base where it is loaded.

The folder has the files of a learned state (:mod:`finetune.core.learned_state`) with the log in place of values, and
the hash of the base's weights in the metadata.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.errors import CapabilityError, CheckpointError
from finetune.core.learned_state import read_learned_state, write_learned_state

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["BASE_HASH", "export_log", "replay_log"]

BASE_HASH = "base_sha256"
"""In the metadata: what :func:`finetune.core.fingerprint.weights_digest` says of the base. It marks a log."""
_LEARNED_DTYPE = "learned_dtype"


def export_log(run: Path, out: Path) -> None:
    """Writes the log of ``run`` to ``out``: a few bytes per step.

    Raises:
        CapabilityError: What was learned is not made of the base and a log alone.
        CheckpointError: The learned state is damaged or belongs to another base.
    """
    from finetune.core.files import replaced_folder
    from finetune.core.fingerprint import weights_digest
    from finetune.core.learned_state import DELTA_CONFIG, FOLLOWERS, LEFT, VALUE
    from finetune.methods.estimator import DECAYS, DISTANCES
    from finetune.models import load_model
    from finetune.models.tuned import base_of, state_folder

    folder = state_folder(run)
    tensors, metadata = read_learned_state(folder) if (folder / DELTA_CONFIG).is_file() else ({}, {})
    if DISTANCES not in tensors:
        raise CapabilityError("only a zeroth-order run has a log", where=str(run), want="a run of mezo or lozo")
    over = metadata["method"] if FOLLOWERS in metadata else metadata.get("over")
    if over:
        raise CapabilityError(
            f"the run trained what {over} added or chose, by random numbers or data that no log holds",
            where=str(run),
            fix="--to peft",
        )
    learned = {str(t.dtype).removeprefix("torch.") for key, t in tensors.items() if key.endswith((LEFT, VALUE))}
    base = base_of(run) or metadata["base_model"]
    model = load_model(base, dtype=metadata["base_dtype"])
    with replaced_folder(out) as beside:
        write_learned_state(
            beside,
            {key: tensors[key] for key in (DISTANCES, DECAYS)},
            {**metadata, "base_model": base, BASE_HASH: weights_digest(model), _LEARNED_DTYPE: "+".join(learned)},
        )


def replay_log(model: Any, tensors: dict[str, torch.Tensor], metadata: dict[str, Any], folder: Path) -> nn.Module:
    """Makes the steps of a log on ``model``, its base, and returns the tuned model.

    Raises:
        CheckpointError: The base has other weights than the run began with, or would be trained in another dtype.
    """
    from finetune.core.fingerprint import weights_digest
    from finetune.methods import build_method
    from finetune.methods.estimator import DECAYS, DISTANCES, Estimator

    found = weights_digest(model)
    if found != metadata[BASE_HASH]:
        raise CheckpointError(
            "the log belongs to a base with other weights, so replaying it would make another model",
            where=str(folder),
            got=f"SHA-256 {found}",
            want=f"{metadata['base_model']}, SHA-256 {metadata[BASE_HASH]}",
        )
    # Directions are numbered through the processes, so that one process makes those of all.
    own = {"queries": tensors[DISTANCES].shape[1], "directions": "shared"}
    method = build_method({"name": metadata["method"], **metadata["config"], **own})
    assert isinstance(method, Estimator)
    tuned = method.attach(model, candidates=metadata["scope"])
    dtype = "+".join({str(tensor.dtype).removeprefix("torch.") for tensor in method.learned_tensors().values()})
    if dtype != metadata[_LEARNED_DTYPE]:
        raise CheckpointError(
            "the log was made with weights of another dtype, whose steps round differently",
            where=str(folder),
            got=dtype,
            want=metadata[_LEARNED_DTYPE],
            fix=f"load the base in {metadata['base_dtype']}",
        )
    method.replay(tensors[DISTANCES], tensors[DECAYS])
    return tuned if method.kind == "delta" else method.merge()
