"""Makes a tuner from outside PEFT one of PEFT's own: by name, from saved files, in every loader of PEFT."""

from __future__ import annotations

from typing import Any

from finetune.core.errors import CapabilityError

__all__ = ["register_tuner"]


def register_tuner(name: str, config: Any, tuner: Any) -> Any:
    """Registers a tuner with the installed PEFT and returns its member of ``PeftType``; without effect the second time.

    ``PeftType`` is a closed enumeration, so it is extended in place, as ``enum`` itself builds members.

    Args:
        name: Lower case; attributes of the tuner's layers begin with it and an underscore.
        config: A dataclass derived from ``PeftConfig``.
        tuner: A class derived from ``BaseTuner``.

    Raises:
        CapabilityError: The installed PEFT has another tuner of that name, or is built differently.
    """
    import peft
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.utils.peft_types import PeftType, register_peft_method

    try:
        member = _member(PeftType, name.upper())
        if member not in PEFT_TYPE_TO_TUNER_MAPPING:
            register_peft_method(name=name, config_cls=config, model_cls=tuner)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CapabilityError(
            f"PEFT {peft.__version__} does not take {name} in: {error}",
            fix="a release of PEFT that finetune-toolkit names in its requirements",
        ) from error
    if PEFT_TYPE_TO_TUNER_MAPPING[member] is not tuner:
        raise CapabilityError(
            f"PEFT {peft.__version__} has a tuner {name!r} of its own", fix="pip install -U finetune-toolkit"
        )
    return member


def _member(enumeration: Any, name: str) -> Any:
    if name in enumeration._member_map_:
        return enumeration._member_map_[name]
    member = str.__new__(enumeration, name)
    member._name_ = member._value_ = name
    member.__objclass__ = enumeration
    member._sort_order_ = len(enumeration._member_names_)
    # Members are class attributes from Python 3.12 on; the enumeration itself refuses to have any set.
    type.__setattr__(enumeration, name, member)
    enumeration._member_names_.append(name)
    enumeration._member_map_[name] = member
    enumeration._value2member_map_[name] = member
    if enumeration(name) is not member:
        raise AttributeError("its enumeration of tuners cannot be extended")
    return member
