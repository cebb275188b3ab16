"""Over how many programs the keys of generation rows are split (flash-decoding: each attends to a share, and what they
found is put together)."""

from typing import NamedTuple

SPLITS = 64
"""Shares of a sequence's keys, at most."""
ROUNDS = 2
"""Programs per multiprocessor that splitting goes for."""
LONG, LONG_SPLITS = 4096, 8
"""Where rows alone keep the GPU busy a longer context is split still, into so many shares at most: one program would
take the time of the whole step for it. More of them would cost the short ones beside it, whose shares are empty."""


class Split(NamedTuple):
    """A sequence's keys have `busy` shares, more where these were longer than LONG, and `most` at most."""

    most: int
    busy: int


ALONE = Split(1, 1)
"""One program has all the keys of a sequence."""


def plan(programs: int, max_context: int, keys: int, cores: int) -> Split:
    """For so many programs without splitting, contexts of at most `max_context` tokens, a program's round of `keys` of
    them, and so many multiprocessors."""
    busy = max(1, min(SPLITS, ROUNDS * cores // programs, -(-max_context // keys)))
    most = max(busy, min(LONG_SPLITS, -(-max_context // LONG)))
    return ALONE if most == 1 else Split(most, busy)
