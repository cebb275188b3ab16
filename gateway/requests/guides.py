"""The constraint of an answer, in the forms that OpenAI and vLLM have for it."""

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
    """As of vLLM. One of these."""

    json: msgspec.Raw = UNSET_JSON
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: msgspec.Raw = UNSET_JSON


class Guided(msgspec.Struct, kw_only=True):
    """The fields of a request that constrain its answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = UNSET_JSON
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class Guide(NamedTuple):
    param: str
    option: dict[str, Any]
    """The ring's option `guided`."""


def guide_of(given: Guided) -> Guide | None:
    """Raises ApiError if there are several."""
    found = [*_of_format(given.response_format), *_of_structured(given.structured_outputs)]
    if is_set(given.guided_json):
        found.append(Guide("guided_json", {"json_schema": json_text(given.guided_json)}))
    if given.guided_regex is not None:
        found.append(Guide("guided_regex", {"regex": given.guided_regex}))
    if given.guided_choice is not None:
        found.append(Guide("guided_choice", {"choice": {"choices": given.guided_choice}}))
    if given.guided_grammar is not None:
        found.append(Guide("guided_grammar", {"ebnf": given.guided_grammar}))
    if len(found) > 1:
        raise invalid(f"cannot be combined with {found[0].param}: an answer has one constraint", found[1].param)
    return found[0] if found else None


def json_text(value: msgspec.Raw) -> str:
    """JSON as it was written; a JSON string is taken to contain JSON."""
    data = bytes(value)
    return str(msgspec.json.decode(data)) if data.startswith(b'"') else data.decode()


def _of_format(given: ResponseFormat | None) -> list[Guide]:
    match given:
        case JsonObject():
            return [Guide("response_format", {"json_object": {}})]
        case JsonSchema(json_schema=schema):
            return [Guide("response_format", {"json_schema": json_text(schema.schema)})]
        case StructuralTag(structures=structures, triggers=triggers):
            text = f'{{"structures": {json_text(structures)}, "triggers": {json_text(triggers)}}}'
            return [Guide("response_format", {"structural_tag": text})]
    return []


def _of_structured(given: StructuredOutputs | None) -> list[Guide]:
    if given is None:
        return []
    options: dict[str, dict[str, Any]] = {}
    if is_set(given.json):
        options["json"] = {"json_schema": json_text(given.json)}
    if given.json_object:
        options["json_object"] = {"json_object": {}}
    if given.regex is not None:
        options["regex"] = {"regex": given.regex}
    if given.choice is not None:
        options["choice"] = {"choice": {"choices": given.choice}}
    if given.grammar is not None:
        options["grammar"] = {"ebnf": given.grammar}
    if is_set(given.structural_tag):
        options["structural_tag"] = {"structural_tag": json_text(given.structural_tag)}
    return [Guide(f"structured_outputs.{name}", option) for name, option in options.items()]


def is_set(value: msgspec.Raw) -> bool:
    """Whether the field is there, and not null."""
    return bytes(value) not in (b"", b"null")
