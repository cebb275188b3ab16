"""The known name nearest to a mistyped one."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known name, or nothing where none is near."""
    found = get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
