"""Where a grammar is complete, its sequence may end: the ids for that are added to the masks of a step."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_worker.guided.memory import WORD_BITS


class EndRow(NamedTuple):
    """A mask to complete."""

    slot: int
    ends: tuple[int, ...]
    """Ids that end its sequence."""
    may_end: bool
    """False: min_tokens forbids these."""


class EndIds(NamedTuple):
    """What masks say of the ids that end a sequence, and of special ids."""

    words: Sequence[int]
    """The words of a mask in which these ids are."""
    others: NDArray[np.uint32]
    """In these words, the bits of all other ids."""
    ends: NDArray[np.uint32]
    """And of those that end it."""

    @staticmethod
    def of(num_words: int, ends: Iterable[int], never: Iterable[int]) -> "EndIds":
        """`never`: ids that stand for no text, either. Ids beyond the mask are not its business."""
        masked: dict[int, int] = defaultdict(int)
        ending: dict[int, int] = defaultdict(int)
        for bits, ids in ((masked, (*ends, *never)), (ending, ends)):
            for each in ids:
                bits[each // WORD_BITS] |= 1 << each % WORD_BITS
        words = [word for word in masked if word < num_words]
        return EndIds(
            words,
            ~np.array([masked[word] for word in words], np.uint32),
            np.array([ending[word] for word in words], np.uint32),
        )


def write_ends(masks: NDArray[np.uint32], rows: Sequence[EndRow], end: int, eos_token_ids: Sequence[int]) -> list[bool]:
    """For each row whether its text is complete: nothing more can follow, and no end is left to draw.

    masks: [slots, words]. end: the id at which a mask says that its grammar is complete. All rows together, since a
    call of numpy takes microseconds.
    """
    slots = [row.slot for row in rows]
    bits = masks[slots, end // WORD_BITS] >> np.uint32(end % WORD_BITS) & 1
    accepting = [bool(bit) for bit in bits.tolist()]
    ending = [accepts and row.may_end for accepts, row in zip(accepting, rows, strict=True)]
    members: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        members[row.ends].append(i)
    for ends, chosen in members.items():
        ids = EndIds.of(masks.shape[1], ends, (end, *eos_token_ids))
        at = np.ix_([slots[i] for i in chosen], ids.words)
        allowed = np.where(np.array([ending[i] for i in chosen])[:, None], ids.ends, np.uint32(0))
        masks[at] = masks[at] & ids.others | allowed
    return [
        accepts and not (row.ends and row.may_end) and not masks[row.slot].any()
        for accepts, row in zip(accepting, rows, strict=True)
    ]
