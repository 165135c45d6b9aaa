"""Every tuner of the installed PEFT as a method, by PEFT's name; and ``dora``, which is LoRA with ``use_dora``."""

from __future__ import annotations

from typing import Any

from finetune.methods.adapters.adalora import AdaLora
from finetune.methods.adapters.peft_catalogue import PeftTunerSource, read_peft_tuners
from finetune.methods.adapters.peft_papers import DESCRIPTIONS, PAPERS
from finetune.methods.adapters.peft_tuner import PeftTuner
from finetune.methods.adapters.shadow import Shadow
from finetune.methods.registry import register

__all__: list[str] = []

_OWN_CLASSES = {"adalora": AdaLora, "shadow": Shadow}
_TASK_IDS = "every batch must carry task_ids, which data of a single task has not"
_VIRTUAL_TOKENS = {"defaults": {"num_virtual_tokens": 20}}
# They are fed to the model as a cache, which a block that is computed again would extend again.
_CACHE = {"recomputes": False}
_PARTICULARS: dict[str, dict[str, Any]] = {
    "adaption_prompt": {"defaults": {"adapter_len": 10}},
    "cartridge": {**_VIRTUAL_TOKENS, **_CACHE},
    "cpt": {"unsuitable": "it needs the ids and types of a prompt's tokens beside every batch, and has its own loss"},
    "dora": {"fixed": {"use_dora": True}},
    "ia3": {"all_linear": False},
    "ln_tuning": {"all_linear": False},
    "multitask_prompt_tuning": {"unsuitable": _TASK_IDS},
    "p_tuning": _VIRTUAL_TOKENS,
    "poly": {"unsuitable": _TASK_IDS},
    "prefix_tuning": {**_VIRTUAL_TOKENS, **_CACHE},
    "prompt_tuning": _VIRTUAL_TOKENS,
    "trainable_tokens": {"required": {"token_indices": "the ids of the tokens whose embeddings train"}},
    "xlora": {"unsuitable": "it mixes adapters that are trained already; train them with lora, then mix with PEFT"},
}
"""Class attributes of :class:`PeftTuner` for those tuners that need them."""


def _define(name: str, source: PeftTunerSource) -> None:
    base = _OWN_CLASSES.get(name, PeftTuner)
    line = DESCRIPTIONS.get(name, f"{name}, a tuner of PEFT.")
    body = {
        "__doc__": f"{line}\n\nFields and files are those of PEFT's ``{source.config_class}``.",
        "__module__": __name__,
        "paper": PAPERS.get(name, ""),
        "source": source,
        **_PARTICULARS.get(name, {}),
    }
    register(name)(type(f"{source.config_class.removesuffix('Config')}Tuner", (base,), body))


for _name, _source in read_peft_tuners().items():
    _define(_name, _source)
_define("dora", read_peft_tuners()["lora"])
