"""Translates each dialect of guides into a grammar of llguidance: what regular expressions, Lark grammars and JSON
schemas mean here."""

import json
import re
from collections.abc import Collection
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from engine_worker.guided.schemas import prepared
from sluice.wire.params import Guide, GuideKind

SYNTAX = frozenset(r"\.+*?()|[]{}^$#&-~/")
"""Characters with a special meaning in a regular expression."""
ALL_TOKENS = '\n%llguidance {"no_forcing": true}\n'
"""Appended to every grammar. Without it, where only one text can follow, llguidance allows only the tokens that the
tokenizer would encode it to, special tokens included."""

TEMPERATURE = re.compile(r"^[?!]?(\w+)\s*\[[^\]\n]*\btemperature\s*=", re.MULTILINE)
"""A temperature among the attributes of a Lark rule."""
NUMBERS = re.compile(
    # String literals, regular expressions and comments are matched first, so that nothing in them is taken for ids.
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|<\[(?P<ids>\d[\d,-]*)\]>'
)
"""Token ids in a Lark grammar, such as `<[7,10-12]>`."""
DECODER = json.JSONDecoder()
PARTS = re.compile(
    # String literals and comments are matched first, so that nothing in them is taken for an expression or a schema.
    r'"(?P<literal>(?:\\.|[^"\\\n])*)"(?!i)|"(?:\\.|[^"\\\n])*"|//[^\n]*'
    r"|/(?P<expression>(?:\\.|[^/\\\n])+)/"
    r"|(?P<json>%json\s*)(?=\{|true\b)"
)
TOKEN = re.compile(r"<[^<>\s\\]+>")
"""A special token as llguidance's grammars name it."""
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    # Not a blank, which the mode (?x) ignores.
    "s": r"[\t-\r\x20]",
    "S": r"[^\t-\r\x20]",
}
"""ASCII classes, by the letter of their escape. llguidance's own cover Unicode, such as the digits of all scripts."""


def grammar_of(guide: Guide, special: Collection[str] = (), *, close: bool = False) -> str:
    """`special`: those of the guide's `shown_tokens` that are special tokens of the model; `close`: see the setting
    `guided_closed_objects`. Raises ValueError on an invalid guide; the grammar may still fail to compile."""
    text = guide.text
    match guide.kind:
        case GuideKind.JSON_OBJECT:
            return _json({"type": "object"}, close=close)
        case GuideKind.JSON_SCHEMA:
            return _schema(text, close=close)
        case GuideKind.REGEX:
            return _regex(text)
        case GuideKind.EBNF:
            return _grammar(text, special, close=close)
        case GuideKind.CHOICE:
            return _choice(text)
        case GuideKind.STRUCTURAL_TAG:
            return _structural_tag(text, close=close)


def numbered_tokens(guide: Guide) -> tuple[range, ...]:
    """Token ids that a valid guide names by number."""
    if guide.kind is not GuideKind.EBNF:
        return ()
    found = (match["ids"] for match in NUMBERS.finditer(guide.text))
    bounds = [item.split("-") for ids in found if ids is not None for item in ids.split(",")]
    return tuple(range(int(bound[0]), int(bound[-1]) + 1) for bound in bounds)


def _lark(text: str) -> str:
    return LLMatcher.grammar_from_lark(text + ALL_TOKENS)


def _json(schema: dict[str, Any], *, close: bool) -> str:
    return _lark(f"start: %json {json.dumps(prepared(schema, close=close))}")


def _grammar(text: str, special: Collection[str], *, close: bool) -> str:
    rule = TEMPERATURE.search(text)
    if rule is not None:
        # llguidance only reports a rule's temperature; the sampler would have to apply it.
        raise ValueError(f"rule {rule[1]} must not set a temperature: the request's applies to all of its output")
    return _lark(prepared_grammar(any_to_lark(text), special, close=close))


def _schema(text: str, *, close: bool) -> str:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError(f"must be a JSON object, not {type(schema).__name__}")
    return _json(schema, close=close)


def _regex(text: str) -> str:
    # llguidance quotes the expression correctly.
    grammar = json.loads(LLMatcher.grammar_from_regex(ascii_classes(text)))
    return _lark(grammar["grammars"][0]["lark_grammar"])


def _choice(text: str) -> str:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("must be a JSON array of at least one string")
    # Not as Lark literals: thousands would exceed a limit on rules, and some characters cannot be written.
    return _regex("|".join(map(_escaped, choices)))


def _escaped(text: str) -> str:
    return "".join("\\" + character if character in SYNTAX else character for character in text)


def _structural_tag(text: str, *, close: bool) -> str:
    """Free text with embedded structures. `text`: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}; the
    begin of each structure starts with one of the triggers."""
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("must be a JSON object with structures and triggers")
    _check_keys("the object", document, ("structures", "triggers", "type"))
    if document.get("type", "structural_tag") != "structural_tag":
        raise ValueError('type must be "structural_tag" or left out')
    triggers, structures = document.get("triggers"), document.get("structures")
    if not isinstance(triggers, list) or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("triggers must be a list of non-empty strings")
    if not isinstance(structures, list) or not structures:
        raise ValueError("structures must be a list of at least one object")
    tags = [_tag(structure, triggers, i, close=close) for i, structure in enumerate(structures)]
    # Triggers are text: special tokens never stand for any.
    return _lark(StructTag.to_grammar(tags, assume_special=False))


def _check_keys(place: str, given: Collection[str], known: Collection[str]) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(f"{place} has {unknown[0]!r}, which is not one of {', '.join(known)}")


def _tag(structure: Any, triggers: list[str], number: int, *, close: bool) -> StructTag:
    place = f"structures[{number}]"
    if not isinstance(structure, dict):
        raise ValueError(f"{place} must be an object with begin, schema and end")
    _check_keys(place, structure, ("begin", "schema", "end"))
    begin, schema, end = structure.get("begin"), structure.get("schema"), structure.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError(f"{place}: begin and end must be strings")
    if not isinstance(schema, dict):
        raise ValueError(f"{place}: schema must be an object")
    matching = [trigger for trigger in triggers if begin.startswith(trigger)]
    if not matching:
        raise ValueError(f"{place}: begin {begin!r} must start with one of the triggers")
    return StructTag(trigger=max(matching, key=len), begin=begin, grammar=prepared(schema, close=close), end=end)


def ascii_classes(expression: str) -> str:
    r"""The expression with \d, \w, \s and their complements limited to ASCII."""
    return ESCAPE.sub(lambda escape: CLASSES.get(escape[1], escape[0]), expression)


def prepared_grammar(text: str, special: Collection[str] = (), *, close: bool) -> str:
    """The grammar with its expressions and schemas prepared like those of other guides, and special tokens in place of
    the literals in `special`. `close`: see `prepared`. Raises ValueError if a schema is not JSON."""
    pieces, at = [], 0
    while match := PARTS.search(text, at):
        pieces.append(text[at : match.start()])
        at = match.end()
        if match["expression"] is not None:
            pieces.append(f"/{ascii_classes(match['expression'])}/")
        elif match["json"] is not None:
            schema, at = DECODER.raw_decode(text, at)
            # The schema true permits any JSON, as {} does.
            pieces.append(match["json"] + json.dumps(prepared({} if schema is True else schema, close=close)))
        elif match["literal"] in special and TOKEN.fullmatch(match["literal"]):
            pieces.append(f" {match['literal']} ")
        else:
            pieces.append(match[0])
    return "".join((*pieces, text[at:]))
