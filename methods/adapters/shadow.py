"""ShadowPEFT without the parameters that cannot train."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar, cast

from finetune.methods.adapters.peft_tuner import PeftTuner

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Shadow"]

_UPDATE = ("shadow_update_transform", "shadow_update_gate")


class Shadow(PeftTuner):
    """ShadowPEFT: what nothing reads stays frozen.

    That is the update of the shadow state after the last adapted block, and the shadow's own embedding where it shares
    the base's.
    """

    whole_weights: ClassVar[str] = "PEFT's shadow computes with the weights of layers outside their forward pass"
    own_optimizer: ClassVar[str] = (
        "PEFT adds the shadow's own loss to that of a forward pass, and under DeepSpeed its gradients are other ones"
    )

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        adapted = super()._attach(model, candidates)
        tuner = cast(Any, adapted).base_model
        last = tuner.model.get_submodule(tuner.targeted_module_names[-1])
        unread = [parameter for name, parameter in last.named_parameters() if name.startswith(_UPDATE)]
        if cast(Any, adapted).active_peft_config.share_embeddings:
            for backbone in tuner.shadow_backbone.values():
                # PEFT takes the embedding out where it knows how to.
                with contextlib.suppress(NotImplementedError):
                    unread.append(backbone.get_input_embeddings().weight)
        for parameter in unread:
            parameter.requires_grad_(False)
        return adapted
