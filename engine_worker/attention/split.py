"""Flash-decoding: over how many programs the keys of generation rows are split, each attending to a share of them."""

from typing import NamedTuple

SPLITS = 64
"""Most shares of a sequence's keys."""
ROUNDS = 2
"""Programs per multiprocessor that splitting aims for."""
USUAL = 8
"""Generation rows that a graph of steps with context is planned for: when it is captured, their number is not known."""
CAPTURED_ROWS = 256
"""Sequences of such a step at most: each program looks at all of them."""
LONG, LONG_SPLITS = 4096, 8
"""Contexts longer than LONG are split even if the batch alone keeps the GPU busy, into at most LONG_SPLITS shares: a
single program would set the time of the step. More would cost the short contexts beside it, whose shares are empty."""


class Split(NamedTuple):
    """A sequence's keys have `busy` shares; more, up to `most`, if these were longer than LONG."""

    most: int
    busy: int


UNSPLIT = Split(1, 1)


def plan_split(programs: int, max_context: int, keys: int, cores: int) -> Split:
    """programs: how many there are without splitting; max_context: tokens; keys: that a program reads per round; cores:
    multiprocessors of the GPU."""
    # No share is smaller than a round of keys.
    busy = max(1, min(SPLITS, ROUNDS * cores // programs, -(-max_context // keys)))
    most = max(busy, min(LONG_SPLITS, -(-max_context // LONG)))
    return UNSPLIT if most == 1 else Split(most, busy)
