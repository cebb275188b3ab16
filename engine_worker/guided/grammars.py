"""The dialects of guides, as grammars of llguidance."""

import json
import re
from collections.abc import Collection
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from sluice.ring.params import Guide, GuideKind

SYNTAX = frozenset(r"\.+*?()|[]{}^$#&-~/")
"""Characters that mean something in an expression."""
ALL_TOKENS = '\n%llguidance {"no_forcing": true}\n'
"""Otherwise, where only one text can follow, the tokenizer's own tokens for it would be the only ones allowed, special
tokens among them."""

TEMPERATURE = re.compile(r"^[?!]?(\w+)\s*\[[^\]\n]*\btemperature\s*=", re.MULTILINE)
"""In the attributes of a rule."""

WHITE_SPACE = {"whitespace_pattern": r"( |\r?\n[ \t]{0,20})?"}
"""Between the parts of JSON, unless the schema says it: what programs write there. A weak model repeats all that may be
repeated; without any, strong ones would have to write tokens that they seldom saw."""


def grammar_of(guide: Guide) -> str:
    """Raises ValueError. The grammar may still be one that cannot be compiled."""
    text = guide.text
    match guide.kind:
        case GuideKind.JSON_OBJECT:
            return _lark(f"start: %json {json.dumps(_bounded({'type': 'object'}))}")
        case GuideKind.JSON_SCHEMA:
            return _schema(text)
        case GuideKind.REGEX:
            return _regex(text)
        case GuideKind.EBNF:
            return _grammar(text)
        case GuideKind.CHOICE:
            return _choice(text)
        case GuideKind.STRUCTURAL_TAG:
            return _structural_tag(text)


def _lark(text: str) -> str:
    return LLMatcher.grammar_from_lark(text + ALL_TOKENS)


def _grammar(text: str) -> str:
    heated = TEMPERATURE.search(text)
    if heated is not None:
        # The library tells its caller, who would have to sample that part differently.
        raise ValueError(f"rule {heated[1]} must have no temperature: the request has one for all of its output")
    return _lark(any_to_lark(text))


def _schema(text: str) -> str:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError(f"must be a JSON object, got {type(schema).__name__}")
    return _lark(f"start: %json {json.dumps(_bounded(schema))}")


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict) or any(name.startswith("whitespace_") for name in options):
        return schema
    return {**schema, "x-guidance": {**options, **WHITE_SPACE}}


def _regex(text: str) -> str:
    # The library knows how to quote it.
    grammar = json.loads(LLMatcher.grammar_from_regex(text))
    return _lark(grammar["grammars"][0]["lark_grammar"])


def _choice(text: str) -> str:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise ValueError("must be a JSON array of at least one string")
    # As literals of Lark, thousands would exceed a limit on rules, and some characters cannot be written.
    return _regex("|".join(map(_escaped, choices)))


def _escaped(text: str) -> str:
    return "".join("\\" + character if character in SYNTAX else character for character in text)


def _structural_tag(text: str) -> str:
    """Free text with structures: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}; each structure
    begins with one of the triggers."""
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("must be a JSON object with structures and triggers")
    _check_keys("it", document, ("structures", "triggers", "type"))
    if document.get("type", "structural_tag") != "structural_tag":
        raise ValueError('type must be "structural_tag" or left out')
    triggers, structures = document.get("triggers"), document.get("structures")
    if not isinstance(triggers, list) or not all(isinstance(each, str) and each for each in triggers):
        raise ValueError("triggers must be a list of texts that are not empty")
    if not isinstance(structures, list) or not structures:
        raise ValueError("structures must be a list of at least one")
    tags = [_tag(structure, triggers, i) for i, structure in enumerate(structures)]
    # Triggers are text: special tokens never stand for any.
    return _lark(StructTag.to_grammar(tags, assume_special=False))


def _check_keys(place: str, given: Collection[str], known: Collection[str]) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(f"{place} has {unknown[0]!r}, which is not one of {', '.join(known)}")


def _tag(structure: Any, triggers: list[str], number: int) -> StructTag:
    place = f"structures[{number}]"
    if not isinstance(structure, dict):
        raise ValueError(f"{place} must be an object with begin, schema and end")
    _check_keys(place, structure, ("begin", "schema", "end"))
    begin, schema, end = structure.get("begin"), structure.get("schema"), structure.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError(f"{place}: begin and end must be texts")
    if not isinstance(schema, dict):
        raise ValueError(f"{place}: schema must be an object")
    found = [trigger for trigger in triggers if begin.startswith(trigger)]
    if not found:
        raise ValueError(f"{place}: begin {begin!r} starts with none of the triggers")
    return StructTag(trigger=max(found, key=len), begin=begin, grammar=_bounded(schema), end=end)
