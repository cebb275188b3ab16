"""Constraints on the output, in the formats of OpenAI and of other servers.

`response_format` has the dialects of OpenAI, vLLM, llama.cpp, TGI, Together, Fireworks and TensorRT-LLM.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from gateway.errors import Explain, invalid

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


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's field of this name, and its predecessor `guided_decoding`. At most one constraint may be set."""

    json: msgspec.Raw = UNSET_JSON
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: msgspec.Raw = UNSET_JSON
    backend: str | None = None
    """Ignored: there is one."""
    disable_fallback: bool | None = None
    """Ignored: there is no other backend."""
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class TgiGrammar(msgspec.Struct, forbid_unknown_fields=True):
    """TGI's form of `grammar`."""

    type: Literal["json", "regex"]
    value: msgspec.Raw


class Guided(msgspec.Struct, kw_only=True):
    """The fields of a request that constrain its output."""

    response_format: ResponseFormat | None = None
    # Fields of vLLM:
    structured_outputs: StructuredOutputs | None = None
    guided_decoding: StructuredOutputs | None = None
    guided_json: msgspec.Raw = UNSET_JSON
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Fields of SGLang and llama.cpp:
    json_schema: msgspec.Raw = UNSET_JSON
    structural_tag: msgspec.Raw = UNSET_JSON
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | TgiGrammar | None = None


class Guide(NamedTuple):
    param: str
    """The HTTP field that the guide came from."""
    option: dict[str, Any]
    """The ring's option `guided`."""
    explain: Explain | None = None
    """Set if the gateway wrote the guide, which the client does not know."""


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
"""By type: the fields, one of which holds the constraint. A structural tag uses both of its fields."""
FORMAT_FIELDS = tuple(field for field in ResponseFormat.__struct_fields__ if field != "type")
KINDS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "json_schema": "json_schema",
    "structural_tag": "structural_tag",
    "regex": "regex",
    "ebnf": "ebnf",
    "grammar": "ebnf",
}
"""The ring's kind of guide by the field that has the constraint."""
KINDS_IN_STRUCTURED = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
UNSUPPORTED = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
"""Fields of `structured_outputs` that may only have neutral values."""
MAX_UNKNOWN = 64
MAX_SHOWN = 64
CONSTRAINT_NAME = re.compile(
    r"guid(ed|ance)|grammar|gbnf|ebnf|regex|schema|struct|format|constrain|json", re.IGNORECASE
)
SIMILARITY = 0.8
"""Least similarity, from 0 to 1 as in difflib, at which an unknown name counts as a misspelt one."""


def guide_of(request: Guided) -> Guide | None:
    """Raises ApiError if the request has several guides."""
    guides = [*_guides(request)]
    if len(guides) > 1:
        raise invalid(f"cannot be combined with {guides[0].param}: only one constraint is allowed", guides[1].param)
    return guides[0] if guides else None


def _guides(request: Guided) -> Iterator[Guide]:
    if request.response_format is not None and (option := _of_response_format(request.response_format)) is not None:
        yield Guide("response_format", option)
    yield from _of_structured(request.structured_outputs, "structured_outputs")
    yield from _of_structured(request.guided_decoding, "guided_decoding")
    for name, kind in KINDS.items():
        value = getattr(request, name)
        if isinstance(value, TgiGrammar):
            yield Guide(name, _of_tgi(value))
        elif is_set(value):
            yield Guide(name, _option(kind, value))


def _of_structured(outputs: StructuredOutputs | None, place: str) -> Iterator[Guide]:
    if outputs is None:
        return
    for name in UNSUPPORTED:
        if getattr(outputs, name):
            raise invalid("is not supported; a schema may have x-guidance", f"{place}.{name}")
    for name, kind in KINDS_IN_STRUCTURED.items():
        value = getattr(outputs, name)
        if is_set(value) and value is not False:
            yield Guide(f"{place}.{name}", _option(kind, value))


def _option(kind: str, value: Any) -> dict[str, Any]:
    match kind:
        case "json_schema" | "structural_tag":
            return {kind: _json_text(value)}
        case "json_object":
            return {kind: {}}
        case "choice":
            return {kind: {"choices": value}}
    return {kind: value}


def _of_tgi(grammar: TgiGrammar) -> dict[str, Any]:
    if grammar.type == "regex":
        return {"regex": _decode_as(str, grammar.value, "grammar.value")}
    return {"json_schema": _json_text(grammar.value)}


def _of_response_format(form: ResponseFormat) -> dict[str, Any] | None:
    """The ring's option `guided`; None if the text is free. Raises ApiError."""
    given = {name: value for name in FORMAT_FIELDS if is_set(value := getattr(form, name))}
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
        return {"regex": _decode_as(str, value, place) if name == "value" else value}
    if form.type == "json_schema" and name == "value":
        value = _decode_as(Schema, value, place)
    return {"json_schema": _json_text(value.schema if isinstance(value, Schema) else value)}


def _structural_tag(given: Mapping[str, msgspec.Raw]) -> str:
    for name in CONSTRAINTS["structural_tag"]:
        if name not in given:
            raise invalid("is missing", f"response_format.{name}")
    return f'{{"structures": {_json_text(given["structures"])}, "triggers": {_json_text(given["triggers"])}}}'


def check_unknown(names: Collection[str]) -> None:
    """Raises ApiError for a field that may be meant to constrain the output: a misspelt one, or one of another server.

    If such a field were ignored, the output would be unconstrained.
    """
    if len(names) > MAX_UNKNOWN:
        raise invalid(f"the body has {len(names)} unknown fields, at most {MAX_UNKNOWN} are allowed")
    for name in names:
        shown = name[:MAX_SHOWN]
        similar = get_close_matches(shown.lower(), Guided.__struct_fields__, 1, SIMILARITY)
        if similar or CONSTRAINT_NAME.search(shown):
            hint = f"did you mean {similar[0]}?" if similar else "the output is constrained by response_format"
            raise invalid(f"is not a known field; {hint}", shown)


def _decode_as(kind: Any, value: msgspec.Raw, place: str) -> Any:
    """Raises ApiError."""
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(str(error), place) from error


def _json_text(value: msgspec.Raw) -> str:
    """The JSON text of a value as the client sent it. If the value is a string, its content is taken to be JSON."""
    data = bytes(value)
    return str(msgspec.json.decode(data)) if data.startswith(b'"') else data.decode()


def is_set(value: object) -> bool:
    """Whether a field of a body is present and not null."""
    return bytes(value) not in (b"", b"null") if isinstance(value, msgspec.Raw) else value is not None
