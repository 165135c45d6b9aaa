"""AdaLoRA: PEFT's tuner with its rank allocation driven by the optimizer's steps, in any loop, and resumable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from finetune.core.learned_state import require_same_shapes
from finetune.methods.adapters.peft_tuner import PeftTuner

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["AdaLora"]

_STEP = "allocator.step"
_AVERAGES = {"allocator.importance.": "exp_avg_ipt", "allocator.uncertainty.": "exp_avg_unc"}
_RANKS = "allocator.ranks."


class AdaLora(PeftTuner):
    """AdaLoRA: prunes the ranks of all layers together, by smoothed importance, down to a budget.

    PEFT leaves it to the training loop to call ``update_and_allocate`` between the optimizer's step and ``zero_grad``;
    here a hook on the step does. Importances, ranks and the step belong to the state.

    References:
        Zhang et al., "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning", arXiv 2303.10512.
    """

    own_optimizer: ClassVar[str] = "it allocates ranks by whole gradients, after the step"
    required: ClassVar[Mapping[str, str]] = {"total_step": "the number of optimizer steps of the run"}

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        from finetune.methods.primitives.step_sync import after_optimizer_step

        adapted = super()._attach(model, candidates)
        self._step = 0
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        self._hook = after_optimizer_step(trained, self._allocate)
        return adapted

    @property
    def _tuner(self) -> Any:
        return cast(Any, self.model).base_model

    @property
    def _resumes_from_own_file(self) -> bool:
        return True

    def _allocate(self, optimizer: Optimizer) -> None:
        self._step += 1
        self._tuner.update_and_allocate(self._step)

    def merge(self) -> nn.Module:
        """Stops the allocation and merges."""
        self._hook.remove()
        return super().merge()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the trained parameters, the running importances, the ranks that are left, and the step."""
        import torch

        state = {**super().state_dict(), _STEP: torch.tensor(self._step)}
        for prefix, attribute in _AVERAGES.items():
            averages = getattr(self._tuner.rankallocator, attribute)
            state |= {f"{prefix}{name}": tensor.detach() for name, tensor in averages.items()}
        ranks = cast(Any, self.model).active_peft_config.rank_pattern or {}
        return state | {f"{_RANKS}{name}": torch.tensor(kept) for name, kept in ranks.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores parameters and allocation; strict about the parameters, as the rest grows with training."""
        import torch

        own = {name: tensor for name, tensor in state.items() if not name.startswith("allocator.")}
        parameters = self.trained_parameters()
        require_same_shapes({name: parameter.detach() for name, parameter in parameters.items()}, own)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(own[name])
        self._step = int(state[_STEP])
        allocator, device = self._tuner.rankallocator, next(iter(parameters.values())).device
        allocator.reset_ipt()
        for prefix, attribute in _AVERAGES.items():
            averages = _part(state, prefix)
            setattr(allocator, attribute, {name: tensor.to(device) for name, tensor in averages.items()})
            # PEFT starts the averages of a parameter anew unless it knows a last importance.
            allocator.ipt |= {name: torch.zeros_like(tensor, device=device) for name, tensor in averages.items()}
        ranks = {name: kept.tolist() for name, kept in _part(state, _RANKS).items()}
        cast(Any, self.model).active_peft_config.rank_pattern = ranks or None


def _part(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor.clone() for name, tensor in state.items() if name.startswith(prefix)}
