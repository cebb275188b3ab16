"""What a person can know of a setting: its flag, variable, type, range, default and description."""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from sluice.settings.fields import LAUNCHER, ByteSize, OtherVariable
from sluice.settings.services import ServiceSettings

BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}
TYPE_NAMES = {bool: "bool", int: "int", float: "number", dict: "JSON object"}


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    flag: str
    variable: str
    other_variable: str | None
    """One of other programs, from which it is read too if its own is not set."""
    annotation: Any
    """Its Python type, without bounds and without None."""
    type_name: str
    """Such as "int" or "auto | cpu | cuda"."""
    range: str
    """Such as "≥ 1, ≤ 4096"; empty: any value of the type."""
    default: str
    """As it would be written; "required" if there is none, "unset" for None."""
    description: str
    launcher_only: bool


def settings_of(cls: type[ServiceSettings]) -> dict[str, Setting]:
    """By name."""
    return {setting.name: setting for settings in sections_of(cls).values() for setting in settings}


def sections_of(cls: type[ServiceSettings]) -> Mapping[str, list[Setting]]:
    """By the docstring of the class that declares them, what all services have first."""
    return _sections_of(cls)  # type: ignore[arg-type] # mypy takes no class of dataclasses for hashable


@cache
def _sections_of(cls: Any) -> dict[str, list[Setting]]:
    found: dict[str, list[Setting]] = {}
    left = {each.name: each for each in fields(cls)}
    for section in (ServiceSettings, *reversed(cls.__mro__)):
        own = [left.pop(name) for name in inspect.get_annotations(section) if name in left]
        if own:
            texts = _field_docstrings(section)
            found[inspect.cleandoc(section.__doc__ or "")] = [_describe(cls, each, texts[each.name]) for each in own]
    return found


def _describe(cls: type[ServiceSettings], field: Field[Any], description: str) -> Setting:
    info = cls.__pydantic_fields__[field.name]  # type: ignore[attr-defined]
    annotation = _without_none(info.annotation)
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
        other_variable=next((each.name for each in info.metadata if isinstance(each, OtherVariable)), None),
        annotation=annotation,
        type_name="bytes" if any(isinstance(each, ByteSize) for each in info.metadata) else _type_name(annotation),
        range=", ".join(bounds),
        default=_default(field),
        description=description,
        launcher_only=LAUNCHER in info.metadata,
    )


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) is not UnionType:
        return annotation
    (only,) = (each for each in get_args(annotation) if each is not NoneType)
    return only


def _type_name(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(parts)
    if origin is tuple:
        return f"list of {_type_name(getattr(parts[0], '__origin__', parts[0]))}"
    return TYPE_NAMES.get(origin or annotation, "text")


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return "none"
    match field.default:
        case None | "":
            return "unset"
        case ():
            return "none"
        case bool() as value:
            return str(value).lower()
        case int() | float() as value:
            return str(value)
        case value:
            return "required" if value is MISSING else str(value)


def _field_docstrings(section: type) -> dict[str, str]:
    """The docstrings under the fields that this class itself declares, each in one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    found = {}
    statements = tree.body if isinstance(tree, ast.ClassDef) else []
    for declared, after in pairwise(statements):
        match declared, after:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str() as text)):
                found[name] = " ".join(text.split())
    return found
