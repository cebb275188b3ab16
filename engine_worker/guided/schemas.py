"""Prepares JSON schemas for llguidance: limits white space, leaves out keywords that change nothing but that llguidance
refuses, and closes objects: no additional properties unless the schema says otherwise."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
"""Keywords whose values map names to schemas."""
DATA = frozenset(("const", "enum", "default", "examples", "example", "x-guidance"))
"""Keywords whose values contain no schema."""
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
"""Keywords whose values are integers. JSON Schema takes 2.0 for an integer, llguidance does not."""
OWN_WORDS = ("additionalProperties", "unevaluatedProperties")
"""Keywords by which a schema determines additional properties itself."""


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


def closed(schema: Schema) -> Schema:
    """The schema with `additionalProperties: false` in each object that lists its properties. Objects that are combined
    with others stay open, because each would refuse the properties of the others."""
    combined: dict[int, Any] = {}
    for part in _schemas(schema):
        parts = list(_combined_parts(schema, part))
        if len(parts) + ("properties" in part) > 1:
            for each in (part, *parts):
                _collect(schema, each, combined)
    result: Schema = _close(schema, combined)
    return result


def _schemas(value: Any) -> Iterator[Schema]:
    """Every schema within a value, itself included."""
    if isinstance(value, list):
        for item in value:
            yield from _schemas(item)
    elif isinstance(value, dict):
        yield value
        for name, item in value.items():
            if name in NAMED_SCHEMAS and isinstance(item, dict):
                yield from _schemas(list(item.values()))
            elif name not in DATA:
                yield from _schemas(item)


def _combined_parts(root: Schema, schema: Schema) -> Iterator[Any]:
    """What applies to the same value as the schema's own keywords: each part of allOf, one of anyOf, one of oneOf, and
    what $ref points to. The alternatives of anyOf or oneOf are yielded as one list."""
    everything = schema.get("allOf")
    yield from everything if isinstance(everything, list) else ()
    yield from (schema[name] for name in ("anyOf", "oneOf") if name in schema)
    if "$ref" in schema:
        yield _target(root, schema["$ref"])


def _collect(root: Schema, value: Any, found: dict[int, Any]) -> None:
    """Add a part, and everything that it combines in turn, to `found`, by id."""
    if isinstance(value, list):
        for item in value:
            _collect(root, item, found)
    elif isinstance(value, dict) and id(value) not in found:
        found[id(value)] = value
        for part in _combined_parts(root, value):
            _collect(root, part, found)


def _target(root: Schema, reference: Any) -> Any:
    """What a reference within the schema points to; None if that does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    value: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdecimal():
            value = value[int(name)] if int(name) < len(value) else None
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value


def _close(value: Any, combined: dict[int, Any]) -> Any:
    if isinstance(value, list):
        return [_close(item, combined) for item in value]
    if not isinstance(value, dict):
        return value
    result: Schema = {}
    for name, item in value.items():
        if name in NAMED_SCHEMAS and isinstance(item, dict):
            result[name] = {key: _close(schema, combined) for key, schema in item.items()}
        else:
            result[name] = item if name in DATA else _close(item, combined)
    is_open = id(value) in combined or any(name in value for name in OWN_WORDS)
    return result if is_open or not isinstance(value.get("properties"), dict) else {**result, OWN_WORDS[0]: False}
