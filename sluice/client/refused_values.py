"""Which value protobuf refused, and what its field expects. Protobuf's own errors name neither."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from reprlib import Repr
from typing import Any, SupportsFloat, SupportsIndex

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtoMessage

SHORT = Repr()
"""Shortens values in messages: a prompt or an image may be long."""
SHORT.maxstring = SHORT.maxother = 100
SHORT.maxlevel = 2


@dataclass(frozen=True, slots=True)
class _Kind:
    accepts: Any
    one: str
    many: str


INTEGER = _Kind(SupportsIndex, "an integer", "integers")
NUMBER = _Kind(SupportsFloat | SupportsIndex, "a number", "numbers")
KINDS = {
    FieldDescriptor.CPPTYPE_STRING: _Kind(str | bytes, "a string", "strings"),
    FieldDescriptor.CPPTYPE_BOOL: _Kind(SupportsIndex, "a bool", "bools"),
    FieldDescriptor.CPPTYPE_DOUBLE: NUMBER,
    FieldDescriptor.CPPTYPE_FLOAT: NUMBER,
    # Any value becomes a name; for an unknown one, protobuf raises a ValueError with the name.
    FieldDescriptor.CPPTYPE_ENUM: _Kind(object, "a name", "names"),
}
"""By type of a field. All others are integers, bytes or messages."""


def refused_value(field: Any, value: Any, path: str) -> str | None:
    """A message about the first value in `value` that `field` (a FieldDescriptor) cannot hold; None: not found."""
    return next(_refusals(field, value, path), None)


def must_be(path: str, expected: str, value: Any) -> str:
    return f"{path} must be {expected} (got {SHORT.repr(value)})"


def _kind(field: Any) -> _Kind:
    if field.message_type is not None:
        fields = f"fields of {field.message_type.full_name}"
        return _Kind(Mapping | ProtoMessage, f"a mapping of {fields}", f"mappings of {fields}")
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _Kind(bytes, "bytes", "bytes")
    return KINDS.get(field.cpp_type, INTEGER)


def _refusals(field: Any, value: Any, path: str) -> Iterator[str]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        yield from _map_refusals(field.message_type.fields_by_name, value, path)
    elif not field.is_repeated:
        yield from _item_refusals(field, value, path)
    elif isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        yield must_be(path, f"a list of {_kind(field).many}", value)
    else:
        for i, item in enumerate(value):
            yield from _item_refusals(field, item, f"{path}[{i}]")


def _map_refusals(entry: Any, value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield must_be(path, f"a mapping of {_kind(entry['key']).many} to {_kind(entry['value']).many}", value)
        return
    for key, item in value.items():
        yield from _item_refusals(entry["key"], key, f"each key of {path}")
        yield from _item_refusals(entry["value"], item, f"{path}[{key!r}]")


def _item_refusals(field: Any, value: Any, path: str) -> Iterator[str]:
    kind = _kind(field)
    if field.message_type is not None and not field.message_type.full_name.startswith("sluice."):
        # Durations and template variables, of which protobuf accepts several types.
        return
    if not isinstance(value, kind.accepts):
        yield must_be(path, kind.one, value)
    elif isinstance(value, Mapping):
        fields = field.message_type.fields_by_name
        for name, item in value.items():
            # An unknown name is an error of its own; None leaves a field unset.
            if name in fields and item is not None:
                yield from _refusals(fields[name], item, f"{path}.{name}")
