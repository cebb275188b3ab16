"""End ids in masks: allowed where the grammar is complete or names them."""

from collections.abc import Collection, Sequence

from engine_worker.guided.memory import WORD_BITS
from engine_worker.guided.vocabulary import Tokens


def write_ends(
    mask: memoryview,
    tokens: Tokens,
    ends: Sequence[int],
    never: Sequence[int],
    numbered: Sequence[range] = (),
    *,
    may_end: bool,
) -> bool:
    """Allow or forbid end ids in a mask. Returns whether the output is complete: no token can follow, and there is no
    end id to sample.

    mask: uint32 words. ends: ids that end the sequence; they are forbidden unless `may_end` (min_tokens). never: other
    ids that must not be sampled as text. numbered: ids that the grammar names by number. An id of `ends` or `never`
    stays allowed where the grammar names it: where it allows a special token, which is never text, or an id in
    `numbered`. Ids beyond the mask are ignored.
    """
    complete, given = _has(mask, tokens.end), (*ends, *never)
    named = [
        token
        for token in given
        if (token in tokens.special or any(token in ids for ids in numbered)) and _has(mask, token)
    ]
    _clear(mask, (*given, tokens.end))
    _set(mask, named if may_end else [token for token in named if token not in ends])
    if complete and may_end:
        _set(mask, ends)
    return (complete or bool(named)) and not (ends and may_end) and not any(mask)


def _has(mask: memoryview, token: int) -> bool:
    word, bit = divmod(token, WORD_BITS)
    return word < len(mask) and bool(mask[word] >> bit & 1)


def _clear(mask: memoryview, ids: Collection[int]) -> None:
    for token in ids:
        word, bit = divmod(token, WORD_BITS)
        if word < len(mask):
            mask[word] &= ~(1 << bit)


def _set(mask: memoryview, ids: Collection[int]) -> None:
    for token in ids:
        word, bit = divmod(token, WORD_BITS)
        if word < len(mask):
            mask[word] |= 1 << bit
