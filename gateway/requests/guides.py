"""Constraints on the output, in the formats of OpenAI and vLLM."""

from typing import Any, NamedTuple

import msgspec

from gateway.errors import invalid

UNSET_JSON = msgspec.Raw()


class Text(msgspec.Struct, tag="text"):
    pass


class JsonObject(msgspec.Struct, tag="json_object"):
    pass


class Schema(msgspec.Struct):
    schema: msgspec.Raw
    name: str = ""
    strict: bool | None = None


class JsonSchema(msgspec.Struct, tag="json_schema"):
    json_schema: Schema


class StructuralTag(msgspec.Struct, tag="structural_tag"):
    structures: msgspec.Raw
    triggers: msgspec.Raw


ResponseFormat = Text | JsonObject | JsonSchema | StructuralTag


class StructuredOutputs(msgspec.Struct):
    """vLLM's field of this name. At most one constraint may be set."""

    json: msgspec.Raw = UNSET_JSON
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: msgspec.Raw = UNSET_JSON


class Guided(msgspec.Struct, kw_only=True):
    """The fields of a request that constrain its output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = UNSET_JSON
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class Guide(NamedTuple):
    param: str
    """The HTTP field that the guide came from."""
    option: dict[str, Any]
    """The ring's option `guided`."""


def guide_of(request: Guided) -> Guide | None:
    """Raises ApiError if the request has several guides."""
    guides = [*_of_format(request.response_format), *_of_structured(request.structured_outputs)]
    if is_set(request.guided_json):
        guides.append(Guide("guided_json", {"json_schema": json_text(request.guided_json)}))
    if request.guided_regex is not None:
        guides.append(Guide("guided_regex", {"regex": request.guided_regex}))
    if request.guided_choice is not None:
        guides.append(Guide("guided_choice", {"choice": {"choices": request.guided_choice}}))
    if request.guided_grammar is not None:
        guides.append(Guide("guided_grammar", {"ebnf": request.guided_grammar}))
    if len(guides) > 1:
        raise invalid(f"cannot be combined with {guides[0].param}: only one constraint is allowed", guides[1].param)
    return guides[0] if guides else None


def json_text(value: msgspec.Raw) -> str:
    """The JSON text of a value as the client sent it. If the value is a string, its content is taken to be JSON."""
    data = bytes(value)
    return str(msgspec.json.decode(data)) if data.startswith(b'"') else data.decode()


def _of_format(response_format: ResponseFormat | None) -> list[Guide]:
    match response_format:
        case JsonObject():
            return [Guide("response_format", {"json_object": {}})]
        case JsonSchema(json_schema=schema):
            return [Guide("response_format", {"json_schema": json_text(schema.schema)})]
        case StructuralTag(structures=structures, triggers=triggers):
            text = f'{{"structures": {json_text(structures)}, "triggers": {json_text(triggers)}}}'
            return [Guide("response_format", {"structural_tag": text})]
    return []


def _of_structured(outputs: StructuredOutputs | None) -> list[Guide]:
    if outputs is None:
        return []
    options: dict[str, dict[str, Any]] = {}
    if is_set(outputs.json):
        options["json"] = {"json_schema": json_text(outputs.json)}
    if outputs.json_object:
        options["json_object"] = {"json_object": {}}
    if outputs.regex is not None:
        options["regex"] = {"regex": outputs.regex}
    if outputs.choice is not None:
        options["choice"] = {"choice": {"choices": outputs.choice}}
    if outputs.grammar is not None:
        options["grammar"] = {"ebnf": outputs.grammar}
    if is_set(outputs.structural_tag):
        options["structural_tag"] = {"structural_tag": json_text(outputs.structural_tag)}
    return [Guide(f"structured_outputs.{name}", option) for name, option in options.items()]


def is_set(value: msgspec.Raw) -> bool:
    """Whether the field is present and not null."""
    return bytes(value) not in (b"", b"null")
