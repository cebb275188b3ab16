"""Where a grammar is complete, its sequence may end: the ids for that are added to its mask."""

from collections.abc import Sequence

from engine_worker.guided.memory import WORD_BITS


def write_ends(mask: memoryview, end: int, ends: Sequence[int], never: Sequence[int], *, may_end: bool) -> bool:
    """Whether the text is complete: nothing more can follow, and no end is left to draw.

    mask: words, uint32. end: the id at which it says that its grammar is complete. ends: ids that end the sequence,
    unless `may_end` is false (min_tokens). never: other ids that stand for no text. Ids beyond the mask are ignored.
    """
    complete = bool(_bit(mask, end))
    for each in (*ends, *never, end):
        word, bit = divmod(each, WORD_BITS)
        if word < len(mask):
            mask[word] &= ~(1 << bit)
    if complete and may_end:
        for each in ends:
            word, bit = divmod(each, WORD_BITS)
            if word < len(mask):
                mask[word] |= 1 << bit
    return complete and not (ends and may_end) and not any(mask)


def _bit(mask: memoryview, number: int) -> int:
    return int(mask[number // WORD_BITS]) >> number % WORD_BITS & 1
