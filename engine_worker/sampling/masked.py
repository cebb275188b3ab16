"""Applies the masks of guided rows on a CPU. Scores are [N, vocab] float32."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_worker.guided.memory import WORD_BITS

Scores = NDArray[np.float32]
Index = NDArray[np.int64]
Masks = NDArray[np.uint32]
Choice = tuple[int, float]
"""A token and its score."""


class MaskedRows(NamedTuple):
    """Rows of scores that have a mask, on the host."""

    rows: Index
    """[G]."""
    masks: Masks
    """[M, words], one bit per token id; at least as many bits as scores."""
    own: Index
    """[G]: index in `masks` of each row's mask."""


def _highest() -> Scores:
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    found = np.where(bits == 1, np.float32(np.inf), np.float32(-np.inf))
    found.flags.writeable = False
    return found


HIGHEST = _highest()
"""[256, 8]: for each byte of a mask, the upper bounds of its eight scores: inf if the token is allowed, else -inf."""
SPARSE = 4
"""A mask is sparse if about one in SPARSE of its words, or fewer, allows a token: only these words' scores are read."""
SAMPLED = 61
"""One in SAMPLED words is read to estimate whether a mask is sparse: few cache lines, and not at a power of two."""


def restrict(scores: Scores, masked: MaskedRows) -> None:
    """Set the scores of all tokens that their row's mask does not allow to -inf, in place."""
    for row, own in zip(masked.rows.tolist(), masked.own.tolist(), strict=True):
        np.minimum(scores[row], _highest_of(masked.masks[own])[: scores.shape[1]], out=scores[row])


def choose_allowed(scores: Scores, masked: MaskedRows) -> tuple[Index, Scores]:
    """The ids of the highest allowed scores, and these scores, [N] each. The lowest id among equals; the score is -inf
    if no token is allowed."""
    tokens, peaks = np.empty(len(scores), np.int64), np.empty(len(scores), np.float32)
    rows, masks, own = masked
    sampled = np.count_nonzero(masks[own, ::SAMPLED], axis=1)
    sparse = sampled <= len(range(0, masks.shape[1], SAMPLED)) // SPARSE
    chosen = _choose_by_words(scores, rows[sparse].tolist(), masks[own[sparse]])
    mask_of = dict(zip(rows.tolist(), own.tolist(), strict=True))
    for row, row_scores in enumerate(scores):
        if (found := chosen.get(row)) is None:
            mask = mask_of.get(row)
            found = _choose(row_scores, None if mask is None else masks[mask])
        tokens[row], peaks[row] = found
    return tokens, peaks


def _choose_by_words(scores: Scores, rows: list[int], masks: Masks) -> dict[int, Choice]:
    """By row; does not read the scores of words that allow no token."""
    # flatnonzero takes a tenth of the time on booleans, for all rows together.
    nonzero = np.flatnonzero(masks != 0)
    ends = np.searchsorted(nonzero, masks.shape[1] * np.arange(1, len(rows) + 1)).tolist()
    chosen, start = {}, 0
    for row, mask, end in zip(rows, masks, ends, strict=True):
        words = nonzero[start:end] % masks.shape[1]
        chosen[row] = _best_of(words, scores[row], mask)
        start = end
    return chosen


def _best_of(words: Index, scores: Scores, mask: Masks) -> Choice:
    """words: indices of all words of the mask that allow a token."""
    if not len(words):
        return 0, -np.inf
    num_words = len(scores) // WORD_BITS
    if words[-1] >= num_words:
        # The last scores do not fill a word.
        return _choose(scores, mask)
    found = scores[: num_words * WORD_BITS].reshape(-1, WORD_BITS).take(words, axis=0).reshape(-1)
    best = int(np.minimum(found, _highest_of(mask.take(words)), out=found).argmax())
    return int(words[best // WORD_BITS]) * WORD_BITS + best % WORD_BITS, float(found[best])


def _choose(scores: Scores, mask: Masks | None) -> Choice:
    best = int(scores.argmax())
    if mask is None or int(mask[best // WORD_BITS]) >> best % WORD_BITS & 1:
        return best, float(scores[best])
    highest = _highest_of(mask)[: len(scores)]
    best = int(np.minimum(scores, highest, out=highest).argmax())
    return best, float(highest[best])


def _highest_of(words: Masks) -> Scores:
    """Upper bounds of the scores that these words stand for. A branch per token takes up to 17 times as long."""
    return HIGHEST.take(words.view(np.uint8), axis=0).reshape(-1)
