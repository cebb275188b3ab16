"""Lark grammars: what their regular expressions and JSON schemas mean here."""

import json
import re
from collections.abc import Collection

from engine_worker.guided.schemas import prepared

DECODER = json.JSONDecoder()
PARTS = re.compile(
    # String literals and comments are matched first, so that nothing in them is taken for one of the others.
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
"""By letter. In llguidance they have all of Unicode, such as the digits of all scripts."""


def ascii_classes(expression: str) -> str:
    r"""The expression with \d, \w, \s and their complements limited to ASCII."""
    return ESCAPE.sub(lambda escape: CLASSES.get(escape[1], escape[0]), expression)


def prepared_grammar(text: str, special: Collection[str] = (), *, close: bool) -> str:
    """The grammar with its expressions and schemas as they are in other guides, and special tokens in place of the
    literals in `special`. `close`: see `prepared`. Raises ValueError if a schema is not JSON."""
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
