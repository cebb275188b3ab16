"""Constraints on the output, in the formats of OpenAI and of other servers."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from gateway.errors import Explain, invalid
from gateway.requests.formats import UNSET_JSON, ResponseFormat, decode_as, is_set, json_text, option_of


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
"""Fields of `structured_outputs` that may only be neutral."""


def guide_of(request: Guided) -> Guide | None:
    """Raises ApiError if the request has several guides."""
    guides = [*_guides(request)]
    if len(guides) > 1:
        raise invalid(f"cannot be combined with {guides[0].param}: only one constraint is allowed", guides[1].param)
    return guides[0] if guides else None


def _guides(request: Guided) -> Iterator[Guide]:
    if request.response_format is not None and (option := option_of(request.response_format)) is not None:
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
            return {kind: json_text(value)}
        case "json_object":
            return {kind: {}}
        case "choice":
            return {kind: {"choices": value}}
    return {kind: value}


def _of_tgi(grammar: TgiGrammar) -> dict[str, Any]:
    if grammar.type == "regex":
        return {"regex": decode_as(str, grammar.value, "grammar.value")}
    return {"json_schema": json_text(grammar.value)}
