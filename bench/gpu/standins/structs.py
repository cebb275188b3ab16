"""msgspec without its codecs: Structs as plain Python objects.

Nothing checks values and nothing keeps one from writing to a frozen one: a check in each `__setattr__` would take
longer than everything else about a Struct, and would be counted as the engine's own time.
"""

from dataclasses import dataclass, field, fields
from inspect import get_annotations
from types import ModuleType
from typing import Any, TypeVar, dataclass_transform

S = TypeVar("S", bound="Struct")


class Meta:
    """A bound of a type; see `Struct` for what is made of it."""

    def __init__(self, **bounds: Any) -> None:
        self.bounds = bounds


@dataclass_transform()
class Struct:
    """What its annotations say, in their order, those of its bases first; equal by value."""

    def __init_subclass__(cls, *, frozen: bool = False, **options: Any) -> None:
        """Options of encoding change nothing here."""
        super().__init_subclass__()
        for name in get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, list | dict | set):
                setattr(cls, name, field(default_factory=default.copy))
        dataclass(unsafe_hash=frozen)(cls)


def replace(struct: S, **changes: Any) -> S:
    """A copy with other values. Raises TypeError on a name that is none of its fields."""
    kind = type(struct)
    values = struct.__dict__ | changes
    if len(values) != len(struct.__dict__):
        unknown = ", ".join(sorted(changes.keys() - struct.__dict__.keys()))
        raise TypeError(f"{kind.__name__} has no field {unknown}")
    copy = kind.__new__(kind)
    copy.__dict__.update(values)
    return copy


def asdict(struct: Struct) -> dict[str, Any]:
    """Values by name; Structs within it stay what they are."""
    return {entry.name: getattr(struct, entry.name) for entry in fields(struct)}  # type: ignore[arg-type]


def msgspec() -> list[ModuleType]:
    """The package and the part of it that is needed."""
    package, structs = ModuleType("msgspec"), ModuleType("msgspec.structs")
    package.Struct, package.Meta, package.structs = Struct, Meta, structs  # type: ignore[attr-defined]
    structs.replace, structs.asdict = replace, asdict  # type: ignore[attr-defined]
    return [package, structs]
