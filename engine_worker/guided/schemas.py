"""Prepares JSON schemas for llguidance: limits white space, and leaves out keywords that change nothing but that
llguidance refuses."""

from collections.abc import Mapping
from typing import Any

from engine_worker.guided.closing import closed
from engine_worker.guided.keywords import DATA, NAMED_SCHEMAS, Schema

WHITE_SPACE = {"whitespace_pattern": r"( |\r?\n[ \t]{0,20})?"}
"""Default for white space between the parts of JSON: what programs usually write. Unbounded white space would let weak
models repeat it; without any, strong models would have to write tokens that they rarely saw in training."""
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Values of `format` that llguidance enforces. All others are annotations, as the standard permits."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
}
"""Keywords that llguidance does not support, with the values with which they change nothing."""
COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
"""Keywords whose values are integers. JSON's 2.0 is one, but not to llguidance."""


def prepared(schema: Schema, *, close: bool) -> Schema:
    """The schema as llguidance must get it. `close`: see the setting `guided_closed_objects`."""
    return _bounded(_rewritten(closed(schema) if close else schema))


def _bounded(schema: Schema) -> Schema:
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict) or any(name.startswith("whitespace_") for name in options):
        return schema
    return {**schema, "x-guidance": {**options, **WHITE_SPACE}}


def _rewritten(value: Any) -> Any:
    if isinstance(value, list):
        return [_rewritten(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _keyword(name, item) for name, item in value.items() if not _changes_nothing(name, item)}


def _changes_nothing(name: str, value: Any) -> bool:
    if name == "format":
        return isinstance(value, str) and value not in FORMATS
    return value in NEUTRAL.get(name, ())


def _keyword(name: str, value: Any) -> Any:
    if name in DATA:
        return value
    if name in NAMED_SCHEMAS and isinstance(value, dict):
        return {key: _rewritten(schema) for key, schema in value.items()}
    if name in COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    return _rewritten(value)
