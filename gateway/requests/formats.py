"""`response_format` in the dialects of OpenAI, vLLM, llama.cpp, TGI, Together, Fireworks and TensorRT-LLM."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from gateway.errors import invalid

UNSET_JSON = msgspec.Raw()


class Schema(msgspec.Struct, forbid_unknown_fields=True):
    schema: msgspec.Raw
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json", "json_schema", "regex", "grammar", "ebnf", "structural_tag"]
    json_schema: Schema | None = None
    schema: msgspec.Raw = UNSET_JSON
    """The schema itself: in llama.cpp, Together, Fireworks and TensorRT-LLM."""
    value: msgspec.Raw = UNSET_JSON
    """In TGI: the schema itself, `json_schema`, or the expression, by the type."""
    pattern: str | None = None
    """The expression in Together."""
    regex: str | None = None
    """The expression in TensorRT-LLM."""
    grammar: str | None = None
    """In Fireworks."""
    ebnf: str | None = None
    """In TensorRT-LLM."""
    structures: msgspec.Raw = UNSET_JSON
    triggers: msgspec.Raw = UNSET_JSON


CONSTRAINTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "text": (),
        "json_object": ("schema", "value"),
        "json": ("schema", "value"),
        "json_schema": ("json_schema", "schema", "value"),
        "regex": ("pattern", "regex", "value"),
        "grammar": ("grammar",),
        "ebnf": ("ebnf",),
        "structural_tag": ("structures", "triggers"),
    }
)
"""By type: the fields of which one has the constraint; of a structural tag both belong to it."""
FIELDS = tuple(field for field in ResponseFormat.__struct_fields__ if field != "type")


def option_of(form: ResponseFormat) -> dict[str, Any] | None:
    """The ring's option `guided`; None if the text is free. Raises ApiError."""
    given = {name: value for name in FIELDS if is_set(value := getattr(form, name))}
    known = CONSTRAINTS[form.type]
    for name in given:
        if name not in known:
            raise invalid(f"does not belong to type {form.type}", f"response_format.{name}")
    if form.type == "text":
        return None
    if form.type == "structural_tag":
        return {"structural_tag": _structural_tag(given)}
    if not given and form.type == "json_object":
        return {"json_object": {}}
    if len(given) != 1:
        raise invalid(f"of type {form.type} must have exactly one of {', '.join(known)}", "response_format")
    ((name, value),) = given.items()
    place = f"response_format.{name}"
    if form.type in ("grammar", "ebnf"):
        return {"ebnf": value}
    if form.type == "regex":
        return {"regex": decode_as(str, value, place) if name == "value" else value}
    if form.type == "json_schema" and name == "value":
        value = decode_as(Schema, value, place)
    return {"json_schema": json_text(value.schema if isinstance(value, Schema) else value)}


def _structural_tag(given: Mapping[str, msgspec.Raw]) -> str:
    for name in CONSTRAINTS["structural_tag"]:
        if name not in given:
            raise invalid("is missing", f"response_format.{name}")
    return f'{{"structures": {json_text(given["structures"])}, "triggers": {json_text(given["triggers"])}}}'


def decode_as(kind: Any, value: msgspec.Raw, place: str) -> Any:
    """Raises ApiError."""
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(str(error), place) from error


def json_text(value: msgspec.Raw) -> str:
    """The JSON text of a value as the client sent it. If the value is a string, its content is taken to be JSON."""
    data = bytes(value)
    return str(msgspec.json.decode(data)) if data.startswith(b'"') else data.decode()


def is_set(value: object) -> bool:
    """Whether a field of a body is present and not null."""
    return bytes(value) not in (b"", b"null") if isinstance(value, msgspec.Raw) else value is not None
