"""Flash-decoding (split-K attention): into how many shares the keys of a generation row are split. Each share is
attended to by its own program of the GPU, and the partial results are combined."""

from typing import NamedTuple

SPLITS = 64
"""Maximum number of shares of a sequence's keys."""
ROUNDS = 2
"""Programs per multiprocessor that splitting aims for."""
USUAL = 8
"""Number of generation rows for which a graph of steps with context is planned: the real number is not known when the
graph is captured."""
CAPTURED_ROWS = 256
"""Maximum number of sequences in a captured step with context: each program reads the bounds of all of them."""
LONG, LONG_SPLITS = 4096, 8
"""Contexts of more than LONG tokens are split even if the batch is large enough to keep the GPU busy: otherwise the one
program of the longest context would determine the time of the step. They are split into at most LONG_SPLITS shares,
since each share also launches a program, without keys, for every short context of the batch."""


class Split(NamedTuple):
    """A sequence's keys are split into `min_shares` shares, or into more, up to `max_shares`, if the shares would
    otherwise be longer than LONG."""

    max_shares: int
    min_shares: int


UNSPLIT = Split(1, 1)


def plan_split(programs: int, max_context: int, keys: int, cores: int) -> Split:
    """programs: number of programs without splitting; max_context: tokens of the longest context; keys: number of keys
    that a program reads per loop iteration; cores: multiprocessors of the GPU."""
    # A share is at least the keys of one loop iteration.
    min_shares = max(1, min(SPLITS, ROUNDS * cores // programs, -(-max_context // keys)))
    max_shares = max(min_shares, min(LONG_SPLITS, -(-max_context // LONG)))
    return UNSPLIT if max_shares == 1 else Split(max_shares, min_shares)
