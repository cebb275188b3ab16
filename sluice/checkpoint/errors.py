"""Why a checkpoint cannot be used."""

from collections.abc import Iterable

LISTED = 5
"""Number of names in an error message."""


class CheckpointError(ValueError):
    """The folder is not a usable checkpoint. The message names the file at fault."""


def listed(names: Iterable[str]) -> str:
    """The first LISTED names, and the number of the others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return ", ".join(ordered[:LISTED]) + more
