"""Fields that the gateway does not know. They are ignored, except those that look like a constraint on the output."""

import re
from collections.abc import Collection
from difflib import get_close_matches

from gateway.errors import invalid
from gateway.requests.guides import Guided

MAX_UNKNOWN = 64
MAX_SHOWN = 64
CONSTRAINT = re.compile(r"guid(ed|ance)|grammar|gbnf|ebnf|regex|schema|struct|format|constrain|json", re.IGNORECASE)
SIMILARITY = 0.8
"""As in difflib, from 0 to 1."""


def check_unknown(names: Collection[str]) -> None:
    """Raises ApiError for a field that may be meant to constrain the output, as the answer would be free text.

    That is a misspelt field, or one of another server.
    """
    if len(names) > MAX_UNKNOWN:
        raise invalid(f"the body has {len(names)} unknown fields, at most {MAX_UNKNOWN} are allowed")
    for name in names:
        shown = name[:MAX_SHOWN]
        similar = get_close_matches(shown.lower(), Guided.__struct_fields__, 1, SIMILARITY)
        if similar or CONSTRAINT.search(shown):
            hint = f"did you mean {similar[0]}?" if similar else "the output is constrained by response_format"
            raise invalid(f"is not a known field; {hint}", shown)
