"""Where a grammar is complete, its sequence may end: the ids for that are added to its mask."""

from collections.abc import Collection, Sequence

from engine_worker.guided.memory import WORD_BITS
from engine_worker.guided.vocabulary import Tokens


def write_ends(mask: memoryview, tokens: Tokens, ends: Sequence[int], never: Sequence[int], *, may_end: bool) -> bool:
    """Whether the text is complete: nothing more can follow, and no end is left to draw.

    mask: words, uint32. ends: the ids that end the sequence, unless `may_end` is false (min_tokens). never: other ids
    that stand for no text. Either stays where the grammar names it. Ids beyond the mask are ignored.
    """
    complete, given = _has(mask, tokens.end), (*ends, *never)
    named = [each for each in given if each in tokens.special and _has(mask, each)]
    _clear(mask, (*given, tokens.end))
    _set(mask, named if may_end else [each for each in named if each not in ends])
    if complete and may_end:
        _set(mask, ends)
    return (complete or bool(named)) and not (ends and may_end) and not any(mask)


def _has(mask: memoryview, number: int) -> bool:
    word, bit = divmod(number, WORD_BITS)
    return word < len(mask) and bool(mask[word] >> bit & 1)


def _clear(mask: memoryview, ids: Collection[int]) -> None:
    for each in ids:
        word, bit = divmod(each, WORD_BITS)
        if word < len(mask):
            mask[word] &= ~(1 << bit)


def _set(mask: memoryview, ids: Collection[int]) -> None:
    for each in ids:
        word, bit = divmod(each, WORD_BITS)
        if word < len(mask):
            mask[word] |= 1 << bit
