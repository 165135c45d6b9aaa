"""The wrapper that makes a tuner of PEFT a method, with PEFT's own config fields and files."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from finetune.core.errors import CapabilityError, ConfigError, TargetError, list_choices, nearest
from finetune.core.learned_state import require_same_method, require_same_shapes
from finetune.methods.adapters.peft_catalogue import PRECISION, PeftTunerSource, make_config
from finetune.methods.base import Kind, Method, MethodConfig
from finetune.methods.state import read_method_file

if TYPE_CHECKING:
    import torch
    from torch import nn

    from finetune.methods.primitives.master_weights import AutocastForward

__all__ = ["PeftTuner"]

_ALL_LINEAR = "all-linear"
_MODULE_PATTERNS = ("target_modules", "feedforward_modules", "modules_to_save")


class _LazyConfig:
    """A class attribute that is made when first read: listing the methods reads none of their configs."""

    def __get__(self, instance: object, owner: type[PeftTuner]) -> type[MethodConfig]:
        return _config_of(owner)


@functools.cache
def _config_of(tuner: type[PeftTuner]) -> type[MethodConfig]:
    return make_config(tuner.source, fixed=tuner.fixed, defaults=tuner.defaults)


class PeftTuner(Method):
    """A tuner of PEFT, with PEFT's own config fields and file form.

    Attributes:
        source: What PEFT's source says about the tuner.
        fixed: Fields of PEFT's config that this method decides.
        defaults: Our defaults, where PEFT has none.
        required: Fields that a recipe must give, and what they mean.
        unsuitable: Why the tuner cannot fine-tune a causal LM on single-task data, or an empty string.
        refuses_by: Kinds of errors by which PEFT's code for the tuner says that it does not accept settings.
        all_linear: Whether it may adapt all linear layers of a model for which PEFT names no targets.
    """

    kind: ClassVar[Kind] = "adapter"
    stock: ClassVar[bool] = True
    Config: ClassVar[type[MethodConfig]] = cast("type[MethodConfig]", _LazyConfig())
    source: ClassVar[PeftTunerSource]
    fixed: ClassVar[Mapping[str, Any]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {}
    required: ClassVar[Mapping[str, str]] = {}
    unsuitable: ClassVar[str] = ""
    refuses_by: ClassVar[tuple[type[Exception], ...]] = (
        ValueError,
        TypeError,
        KeyError,
        NotImplementedError,
        AssertionError,
    )
    all_linear: ClassVar[bool] = True

    def __init__(self, config: MethodConfig | None = None) -> None:
        if self.unsuitable:
            raise CapabilityError(
                f"{self.name} cannot fine-tune a causal LM: {self.unsuitable}",
                where="method.name",
                fix="another method (finetune ls methods)",
            )
        super().__init__(config)
        for key, meaning in self.required.items():
            if not getattr(self.config, key):
                raise ConfigError(
                    f"{self.name} needs {key}: {meaning}", where=f"method.{key}", fix=f"method.{key}: ..."
                )
        self._peft_config({})

    def _peft_type(self) -> Any:
        """Returns what PEFT calls the tuner."""
        from peft import PeftType

        return PeftType(self.source.name.upper())

    def _peft_config(self, found: Mapping[str, Any]) -> Any:
        """Returns PEFT's config from the fields that were given, ours where PEFT has no default, and ``found``."""
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING

        ours = self.config.model_fields_set | self.defaults.keys()
        given = {name: value for name, value in self.config if name in ours - PRECISION.keys()}
        with _refusals(self.name, self.refuses_by):
            config_class = PEFT_TYPE_TO_CONFIG_MAPPING[self._peft_type()]
            return config_class(task_type="CAUSAL_LM", **{**given, **self.fixed, **found})

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        from peft import get_peft_model

        self._base_dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        config = self._peft_config(self._found_in(model, candidates))
        wide = getattr(self.config, "trainable_dtype", "float32") == "float32"
        # Without weights, what is not implemented is looking at them: no word about the settings.
        blank = any(parameter.is_meta for parameter in model.parameters())
        refuses_by = tuple(kind for kind in self.refuses_by if not (blank and kind is NotImplementedError))
        with _refusals(self.name, refuses_by):
            adapted = cast("nn.Module", get_peft_model(cast(Any, model), config, autocast_adapter_dtype=wide))
        self._autocast = self._compute_narrow(adapted) if wide else None
        return adapted

    def _compute_narrow(self, adapted: nn.Module) -> AutocastForward | None:
        """Makes what trains float32, and lets a 16-bit model compute in its own dtype all the same."""
        from finetune.methods.primitives.master_weights import AutocastForward, autocast_adapters, widen

        # PEFT keeps most adapters in float32, but not those that are copies of the base's own weights.
        narrow = widen(parameter for parameter in adapted.parameters() if parameter.requires_grad)
        if narrow is not None:
            return AutocastForward([adapted], narrow)
        if getattr(self.config, "compute_dtype", "trainable") == "base":
            return autocast_adapters(adapted, next(iter(self._base_dtypes.values())))
        return None

    def _found_in(self, model: Any, candidates: frozenset[str]) -> dict[str, Any]:
        """Checks the patterns against ``model`` and returns the fields that depend on it."""
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

        fields = type(self.config).model_fields
        for key in _MODULE_PATTERNS:
            if (patterns := getattr(self.config, key, None)) is not None:
                _require_matches(f"method.{key}", patterns, [name for name, _ in model.named_modules() if name])
        if "adapter_layers" in fields and getattr(self.config, "adapter_layers", None) is None:
            return {"adapter_layers": model.config.get_text_config().num_hidden_layers}
        narrowed = not candidates.issuperset(name for name, _ in model.named_parameters())
        if "target_modules" not in fields:
            if narrowed:
                raise CapabilityError(f"{self.name} adds to the model as a whole, so nothing can narrow it")
            return {}
        targets = getattr(self.config, "target_modules", None)
        mapping = getattr(PEFT_TYPE_TO_TUNER_MAPPING[self._peft_type()], "target_module_mapping", {})
        # A tuner with an empty mapping finds its own targets.
        if targets is None and mapping:
            targets = mapping.get(model.config.model_type) or (_ALL_LINEAR if self.all_linear else None)
        if not narrowed:
            return {} if targets is None else {"target_modules": targets}
        return {"target_modules": _within(model, targets or _ALL_LINEAR, candidates)}

    @property
    def _resumes_from_own_file(self) -> bool:
        """Whether PEFT's file holds the outcome of what trains, from which training could not go on."""
        return bool(cast(Any, self.model).active_peft_config.is_prompt_learning)

    def _resumed_parameters(self) -> dict[str, nn.Parameter]:
        """Returns what trains, and what a prompt encoder drew at random and keeps frozen."""
        named = self.model.named_parameters()
        return {name: p for name, p in named if p.requires_grad or name.startswith("prompt_encoder.")}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the adapter's tensors by PEFT's names; those of a prompt encoder by their name in the model."""
        from peft import get_peft_model_state_dict

        if self._resumes_from_own_file:
            return {name: parameter.detach() for name, parameter in self._resumed_parameters().items()}
        state = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in state.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Writes the tensors into the adapter and reads them back: PEFT itself drops what it cannot place."""
        import torch
        from peft import set_peft_model_state_dict

        from finetune.methods.primitives.peft_files import require_equal

        require_same_shapes(self.state_dict(), state)
        if self._resumes_from_own_file:
            with torch.no_grad():
                for name, parameter in self._resumed_parameters().items():
                    parameter.copy_(state[name])
        else:
            set_peft_model_state_dict(cast(Any, self.model), dict(state))
        require_equal(self.state_dict(), state)

    def save(self, folder: str | Path) -> None:
        """Writes PEFT's adapter files, ``method.json`` last, and before it what only resuming needs."""
        from finetune.methods.primitives.peft_files import write_adapter

        resume_only = self.state_dict() if self._resumes_from_own_file else {}
        write_adapter(Path(folder), self.model, metadata=self.metadata(), resume_only=resume_only)

    def load(self, folder: str | Path) -> None:
        """Reads what :meth:`save` wrote; strict."""
        from finetune.methods.primitives.peft_files import read_adapter

        if metadata := read_method_file(Path(folder)):
            require_same_method(self.metadata(), metadata, Path(folder))
        self.load_state_dict(read_adapter(Path(folder), resume_only=self._resumes_from_own_file))

    def export_adapter(self, folder: str | Path) -> None:
        """Writes the adapter as it is: PEFT made it."""
        from finetune.methods.primitives.peft_files import write_adapter

        write_adapter(Path(folder), self.model)

    def merge(self) -> nn.Module:
        """Adds the update to the base in float32, rounds once, and returns the plain model.

        Raises:
            CapabilityError: What the adapter does depends on the input, so no weights say it.
        """
        from finetune.methods.primitives.peft_files import merge_adapter

        if self._autocast is not None:
            self._autocast.remove()
        merged = merge_adapter(self.model, self._base_dtypes)
        self._model = None
        return merged

    def _chosen(self) -> tuple[str, ...]:
        config = cast(Any, self.model).active_peft_config
        if config.is_prompt_learning:
            return (f"{config.num_virtual_tokens} virtual tokens",)
        names = getattr(cast(Any, self.model).base_model, "targeted_module_names", [])
        kinds = Counter(str(name).rpartition(".")[2] for name in names)
        return tuple(f"{number} x {kind}" for kind, number in kinds.items())


@contextlib.contextmanager
def _refusals(name: str, kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    """Says in our words what PEFT refuses in its own, by errors of these kinds."""
    try:
        yield
    except ImportError as error:
        raise CapabilityError(f"{name} needs another package", where="method.name", got=str(error)) from error
    except kinds as error:
        raise ConfigError(
            f"PEFT refuses the settings of {name}",
            where="method",
            got=" ".join(str(error).split()),
            fix=f"finetune ls methods {name} lists its keys",
        ) from error


def _require_matches(key: str, patterns: Iterable[str] | str, names: list[str]) -> None:
    """P4: every pattern matches a module; a string is a regular expression over whole names."""
    if isinstance(patterns, str):
        unmatched = [] if patterns == _ALL_LINEAR or any(re.fullmatch(patterns, name) for name in names) else [patterns]
    else:
        unmatched = [pattern for pattern in patterns if not any(_ends_with(name, pattern) for name in names)]
    if unmatched:
        counts = Counter(segment for name in names if not (segment := name.rpartition(".")[2]).isdigit())
        raise TargetError(
            "no module matches " + ", ".join(map(repr, unmatched)),
            where=key,
            want=list_choices(f"{name} ({number})" for name, number in counts.items()),
            near=nearest(unmatched[0], counts),
        )


def _ends_with(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}")


def _within(model: Any, targets: Iterable[str] | str, candidates: frozenset[str]) -> list[str]:
    """Returns the modules that ``targets`` match and whose weight is a candidate."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    def matches(name: str, module: nn.Module) -> bool:
        if targets == _ALL_LINEAR:
            return isinstance(module, nn.Linear | Conv1D) and module is not model.get_output_embeddings()
        if isinstance(targets, str):
            return re.fullmatch(targets, name) is not None
        return any(_ends_with(name, target) for target in targets)

    found = [name for name, module in model.named_modules() if f"{name}.weight" in candidates and matches(name, module)]
    if not found:
        raise TargetError(
            "no target module lies within what the earlier methods left trainable",
            where="method",
            got=targets if isinstance(targets, str) else ", ".join(targets),
            want=list_choices(sorted(candidates)),
        )
    return found
