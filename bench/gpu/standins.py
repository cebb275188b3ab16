"""Stand-ins for packages that are missing on a machine with only torch and transformers: msgspec's Structs as plain
Python objects, without codecs, and structlog's types.

Values are not validated, and a frozen Struct can be written to: a check in each `__setattr__` would cost more than all
other operations on a Struct, and its time would be measured as the engine's.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from inspect import get_annotations
from types import ModuleType
from typing import Any, TypeVar, dataclass_transform

S = TypeVar("S", bound="Struct")


class Meta:
    def __init__(self, **bounds: Any) -> None:
        self.bounds = bounds


@dataclass_transform()
class Struct:
    """A class whose fields are its annotations, those of base classes first. Instances compare by value."""

    def __init_subclass__(cls, *, frozen: bool = False, **options: Any) -> None:
        """`options` are ignored: they affect only encoding."""
        super().__init_subclass__()
        for name in get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, list | dict | set):
                setattr(cls, name, field(default_factory=default.copy))
        dataclass(unsafe_hash=frozen)(cls)


def replace(struct: S, **changes: Any) -> S:
    """Return a copy with changed fields. Raises TypeError for an unknown field."""
    kind = type(struct)
    values = struct.__dict__ | changes
    if len(values) != len(struct.__dict__):
        unknown = ", ".join(sorted(changes.keys() - struct.__dict__.keys()))
        raise TypeError(f"{kind.__name__} has no field {unknown}")
    copy = kind.__new__(kind)
    copy.__dict__.update(values)
    return copy


def asdict(struct: Struct) -> dict[str, Any]:
    return {entry.name: getattr(struct, entry.name) for entry in fields(struct)}  # type: ignore[arg-type]


class BoundLogger:
    """Used only in signatures: callers pass their own logger."""


class DecodeError(ValueError):
    """Used only in `except` clauses: nothing is decoded."""


class Raw(bytes):
    """Used only in signatures."""


class Codec:
    """Used only for module constants: nothing is encoded or decoded."""

    def __init__(self, *types: Any, **hooks: Any) -> None: ...

    def __class_getitem__(cls, kind: Any) -> type["Codec"]:
        return cls


def encode(value: Any) -> bytes:
    """Used only for digests: equal values give equal bytes on the same machine."""
    return repr(value).encode()


def msgspec() -> list[ModuleType]:
    structs = _module("msgspec.structs", replace=replace, asdict=asdict)
    msgpack = _module("msgspec.msgpack", Encoder=Codec, Decoder=Codec, encode=encode)
    top = _module(
        "msgspec", Struct=Struct, Meta=Meta, DecodeError=DecodeError, Raw=Raw, structs=structs, msgpack=msgpack
    )
    return [top, structs, msgpack]


def structlog() -> list[ModuleType]:
    stdlib = _module("structlog.stdlib", BoundLogger=BoundLogger)
    typing = _module("structlog.typing", EventDict=Any, ExcInfo=Any, Processor=Any, WrappedLogger=Any)
    return [_module("structlog", stdlib=stdlib, typing=typing), stdlib, typing]


def _module(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(values)
    return module


MAKERS: Mapping[str, Callable[[], list[ModuleType]]] = {"msgspec": msgspec, "structlog": structlog}
STANDS_IN = "stands_in"
"""Name of an attribute that only stand-in modules have."""


def install() -> None:
    """Install a stand-in for each package that is missing."""
    for name, make in MAKERS.items():
        if name not in sys.modules and find_spec(name) is None:
            for module in make():
                setattr(module, STANDS_IN, True)
                sys.modules[module.__name__] = module


def installed() -> tuple[str, ...]:
    """Names of the packages that stand-ins replace."""
    return tuple(name for name in MAKERS if hasattr(sys.modules.get(name), STANDS_IN))
