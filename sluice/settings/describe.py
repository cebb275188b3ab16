"""Describes settings for users: flag, environment variable, type, range, default and description."""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from sluice.settings.fields import ADVANCED, LAUNCHER, ByteSize, OtherVariable
from sluice.settings.process import ProcessSettings

BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}
TYPE_NAMES = {bool: "bool", int: "int", float: "number", dict: "JSON object"}
ADVANCED_TITLE = "Advanced: from TensorRT-LLM's configuration"
"""Title of the section that has the ADVANCED settings of all other sections."""
BYTE_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    flag: str
    variable: str
    other_variable: str | None
    """A variable shared with other programs, such as OTEL_EXPORTER_OTLP_ENDPOINT. Read if `variable` is not set."""
    annotation: Any
    """The Python type, without bounds and without None."""
    type_name: str
    """For users, such as "int" or "auto | cpu | cuda"."""
    range: str
    """The bounds, such as "≥ 1, ≤ 4096". Empty if every value of the type is valid."""
    default: str
    """As a user would write it; "required" without a default, "unset" for None, "empty" for a list or mapping."""
    launcher_only: bool
    advanced: bool
    section: type
    """The class that declares the setting."""

    @property
    def description(self) -> str:
        return _field_docstrings(self.section)[self.name]


def settings_of(cls: type[ProcessSettings]) -> dict[str, Setting]:
    """The settings of a service, by name."""
    return {setting.name: setting for settings in sections_of(cls).values() for setting in settings}


def sections_of(cls: type[ProcessSettings]) -> Mapping[str, list[Setting]]:
    """The settings of a service, by the docstring of the class that declares them.

    Settings that all services share come first; ADVANCED ones, whatever their class, come last.
    """
    return _sections_of(cls)  # type: ignore[arg-type] # mypy does not regard a dataclass's type as hashable


@cache
def _sections_of(cls: Any) -> dict[str, list[Setting]]:
    sections: dict[str, list[Setting]] = {}
    advanced: list[Setting] = []
    undescribed = {field.name: field for field in fields(cls)}
    for section in (ProcessSettings, *reversed(cls.__mro__)):
        declared = [undescribed.pop(name) for name in inspect.get_annotations(section) if name in undescribed]
        if declared:
            title = inspect.cleandoc(section.__doc__ or "")
            settings = [_describe(cls, field, section) for field in declared]
            sections[title] = [setting for setting in settings if not setting.advanced]
            advanced += [setting for setting in settings if setting.advanced]
    return {title: settings for title, settings in {**sections, ADVANCED_TITLE: advanced}.items() if settings}


def _describe(cls: type[ProcessSettings], field: Field[Any], section: type) -> Setting:
    info = cls.__pydantic_fields__[field.name]  # type: ignore[attr-defined]
    annotation = _without_none(info.annotation)
    is_bytes = any(isinstance(item, ByteSize) for item in info.metadata)
    bounds = [
        text.format(f"{getattr(bound, name):.12g}")
        for bound in info.metadata
        for name, text in BOUNDS.items()
        if getattr(bound, name, None) is not None
    ]
    return Setting(
        name=field.name,
        flag=f"--{field.name.replace('_', '-')}",
        variable=f"{cls.prefix()}{field.name.upper()}",
        other_variable=next((item.name for item in info.metadata if isinstance(item, OtherVariable)), None),
        annotation=annotation,
        type_name="bytes" if is_bytes else _type_name(annotation),
        range=", ".join(bounds),
        default=_default(field, is_bytes),
        launcher_only=LAUNCHER in info.metadata,
        advanced=ADVANCED in info.metadata,
        section=section,
    )


def _without_none(annotation: Any) -> Any:
    # `Literal[...] | None` is a typing.Union, `str | None` a types.UnionType.
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    (member,) = (member for member in get_args(annotation) if member is not NoneType)
    return member


def _type_name(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(parts)
    if origin is tuple:
        return f"list of {_type_name(getattr(parts[0], '__origin__', parts[0]))}"
    return TYPE_NAMES.get(origin or annotation, "text")


def _default(field: Field[Any], is_bytes: bool) -> str:
    if field.default_factory is not MISSING:
        return "empty"
    match field.default:
        case None | "":
            return "unset"
        case ():
            return "empty"
        case tuple() as value:
            return ",".join(map(str, value))
        case bool() as value:
            return str(value).lower()
        case int() as value if is_bytes:
            return _with_unit(value)
        case int() | float() as value:
            return f"{value:.12g}"
        case value:
            return "required" if value is MISSING else str(value)


def _with_unit(size: int) -> str:
    """A number of bytes with the largest unit that divides it, such as 64MiB."""
    for unit, factor in BYTE_UNITS.items():
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


@cache
def _field_docstrings(section: type) -> Mapping[str, str]:
    """The docstrings under the fields that this class itself declares, each in one line.

    They are in the source only, and to parse it takes as long as all else that reads settings: services do not.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    texts = {}
    statements = tree.body if isinstance(tree, ast.ClassDef) else []
    for statement, next_statement in pairwise(statements):
        match statement, next_statement:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str() as text)):
                texts[name] = " ".join(text.split())
    return texts
