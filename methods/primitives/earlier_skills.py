"""Skills that an earlier ``mhr`` run has trained, and that a new run adapts to new tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.core.errors import CheckpointError, list_choices
from finetune.methods.primitives.peft_files import ADAPTER_CONFIG, read_adapter
from finetune.methods.primitives.skill_layer import LinearSkills
from finetune.methods.primitives.skill_tuner import SkillsTuner
from finetune.methods.state import read_method_file

__all__ = ["EarlierSkills"]

_INSIDE = "base_model.model."
_PARTS = ("mhr_a", "mhr_b")


class EarlierSkills:
    """The final folder of the earlier run.

    Attributes:
        folder: Where it is.
        config: Its ``adapter_config.json``, whose keys are those of ``SkillsConfig``.

    Raises:
        CheckpointError: There is no mhr run, or it trained more than skills.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / ADAPTER_CONFIG
        if not path.is_file():
            raise CheckpointError(
                f"{ADAPTER_CONFIG} is missing", where=str(folder), want="the final folder of an mhr run"
            )
        self.config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if self.config.get("peft_type") != "MHR":
            found = str(self.config.get("peft_type"))
            raise CheckpointError("the skills to adapt are not there", where=str(folder), got=found, want="an mhr run")
        if whole := self.config.get("modules_to_save"):
            raise CheckpointError(
                "the earlier run trained whole modules besides its skills, and they would be lost",
                where=str(folder),
                got=list_choices(whole),
                want="a run without method.modules_to_save",
            )

    @property
    def has_router(self) -> bool:
        """Whether its tasks had gates of their own."""
        return int(self.config["n_skills"]) > 1 and self.config["routing"] != "uniform"

    def require_base(self, fingerprint: str) -> None:
        """Checks that the skills were trained on the base with this fingerprint.

        Raises:
            CheckpointError: They were not.
        """
        recorded = read_method_file(self.folder).get("base_fingerprint", fingerprint)
        if recorded != fingerprint:
            raise CheckpointError(
                "the skills were trained on another base model",
                where=str(self.folder),
                got=f"fingerprint {fingerprint}",
                want=f"{recorded}, of {self.config.get('base_model_name_or_path') or 'the earlier run'}",
            )

    @torch.no_grad()
    def write_into(self, tuner: SkillsTuner, *, mean: bool) -> None:
        """Writes the skills, or their mean, into the layers, and the earlier tasks' gates beside the new ones.

        Args:
            tuner: Of the new run; one without weights is only checked.
            mean: Whether the mean of the skills is written.

        Raises:
            CheckpointError: The new run adapts other layers than the earlier one.
        """
        earlier = read_adapter(self.folder)
        layers = {name: module for name, module in tuner.model.named_modules() if isinstance(module, LinearSkills)}
        self._require_same_layers(earlier, layers)
        if any(parameter.is_meta for parameter in tuner.parameters()):
            return
        for name, layer in layers.items():
            for part in _PARTS:
                own: Tensor = getattr(layer, part)["default"]
                skills = earlier[f"{_INSIDE}{name}.{part}"]
                own.copy_(skills.mean(1).view_as(own) if mean else skills)
        if "default" in tuner.mhr_known:
            known = [earlier[key] for key in ("base_model.mhr_known", "base_model.mhr_router") if key in earlier]
            tuner.mhr_known["default"].copy_(torch.cat(known))

    def _require_same_layers(self, earlier: Iterable[str], layers: Iterable[str]) -> None:
        had = {key.removeprefix(_INSIDE).rpartition(".")[0] for key in earlier if key.endswith(_PARTS)}
        if other := had.symmetric_difference(layers):
            raise CheckpointError(
                "the skills are of other layers than this run adapts",
                where="method.target_modules",
                got=list_choices(sorted(other)),
                want=f"the {len(had)} layers of {self.folder}",
                fix="leave method.target_modules, exclude_modules and layers_to_transform out",
            )
