"""The guided draws of a step: their masks are requested from the guide worker, then collected and, on a CPU, applied.

Scores are [N, vocab] float32.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_worker.guided.masks import Masks
from engine_worker.guided.memory import WORD_BITS
from engine_worker.sampling.logit_rules import StepRules
from sluice.wire.errors import Fault

Scores = NDArray[np.float32]
Index = NDArray[np.int64]
MaskBits = NDArray[np.uint32]
Choice = tuple[int, float]
"""A token and its score."""
SPARSE = 4
"""A mask is sparse if about one in SPARSE of its words, or fewer, allows a token: only these words' scores are read."""
SAMPLED = 61
"""One in SAMPLED words is read to estimate whether a mask is sparse: few cache lines, and not at a power of two."""


class MaskedRows(NamedTuple):
    """Rows of scores that have a mask, on the host."""

    rows: Index
    """[G]."""
    masks: MaskBits
    """[M, words], one bit per token id; at least as many bits as scores."""
    mask_index: Index
    """[G]: index in `masks` of each row's mask."""


class GuidedDraws(NamedTuple):
    """Results of the guide worker."""

    draws: Index
    """[G]: draws with a mask."""
    masks: MaskBits
    """[M, words], one bit per token id; valid until masks are requested again."""
    mask_index: Index
    """[G]: index in `masks` of each draw's mask."""
    faults: Mapping[int, Fault]
    """By draw."""
    complete: Sequence[int]
    """Draws whose sequences are complete: nothing can follow."""
    later: Sequence[int]
    """Draws whose guides are not ready."""

    def among(self, draws: list[int] | None) -> MaskedRows | None:
        """The masks of a group that has these draws, ascending, by row of the group; `draws` None: all draws of the
        step. Returns None if no row has a mask."""
        if draws is None:
            return MaskedRows(self.draws, self.masks, self.mask_index) if len(self.mask_index) else None
        rows = np.searchsorted(draws, self.draws)
        inside = np.take(draws, rows, mode="clip") == self.draws
        return MaskedRows(rows[inside], self.masks, self.mask_index[inside]) if inside.any() else None


class RequestedMasks(NamedTuple):
    """The masks of a step's guided draws, which are being computed."""

    masks: Masks
    draws: NDArray[np.int64]

    @staticmethod
    def of(masks: Masks, rules: StepRules, previous_tokens: Sequence[int] | None) -> "RequestedMasks | None":
        """Request the masks. `previous_tokens`: see `StepRules.advanced`. Returns None if no draw is guided."""
        requests = rules.guided(previous_tokens)
        if not requests:
            return None
        masks.request(list(requests.values()))
        return RequestedMasks(masks, np.array(list(requests)))

    def collect(self) -> GuidedDraws:
        """Wait for the masks."""
        masks, faults, complete, unread, later = self.masks.collect()
        without_mask = [*faults, *complete, *unread, *later]
        mask_index = np.arange(len(self.draws))
        if not without_mask:
            return GuidedDraws(self.draws, masks, mask_index, {}, (), ())
        mask_index = np.delete(mask_index, without_mask)
        faults_by_draw = {int(self.draws[i]): fault for i, fault in faults.items()}
        complete_draws, later_draws = (self.draws[list(slots)].tolist() for slots in (complete, later))
        return GuidedDraws(self.draws[mask_index], masks, mask_index, faults_by_draw, complete_draws, later_draws)


def _highest() -> Scores:
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    bounds = np.where(bits == 1, np.float32(np.inf), np.float32(-np.inf))
    bounds.flags.writeable = False
    return bounds


HIGHEST = _highest()
"""[256, 8]: for each byte of a mask, the upper bounds of its eight scores: inf if the token is allowed, else -inf."""


def restrict(scores: Scores, masked: MaskedRows) -> None:
    """Set the scores of all tokens that their row's mask does not allow to -inf, in place."""
    for row, mask in zip(masked.rows.tolist(), masked.mask_index.tolist(), strict=True):
        np.minimum(scores[row], _highest_of(masked.masks[mask])[: scores.shape[1]], out=scores[row])


def choose_allowed(scores: Scores, masked: MaskedRows) -> tuple[Index, Scores]:
    """The ids of the highest allowed scores, and these scores, [N] each. The lowest id among equals; the score is -inf
    if no token is allowed."""
    tokens, peaks = np.empty(len(scores), np.int64), np.empty(len(scores), np.float32)
    rows, masks, mask_index = masked
    sampled = np.count_nonzero(masks[mask_index, ::SAMPLED], axis=1)
    sparse = sampled <= len(range(0, masks.shape[1], SAMPLED)) // SPARSE
    chosen = _choose_by_words(scores, rows[sparse].tolist(), masks[mask_index[sparse]])
    mask_of = dict(zip(rows.tolist(), mask_index.tolist(), strict=True))
    for row, row_scores in enumerate(scores):
        if (choice := chosen.get(row)) is None:
            mask = mask_of.get(row)
            choice = _choose(row_scores, None if mask is None else masks[mask])
        tokens[row], peaks[row] = choice
    return tokens, peaks


def _choose_by_words(scores: Scores, rows: list[int], masks: MaskBits) -> dict[int, Choice]:
    """By row; does not read the scores of words that allow no token."""
    # On booleans, and for all rows together, flatnonzero takes a tenth of the time.
    nonzero = np.flatnonzero(masks != 0)
    ends = np.searchsorted(nonzero, masks.shape[1] * np.arange(1, len(rows) + 1)).tolist()
    chosen, start = {}, 0
    for row, mask, end in zip(rows, masks, ends, strict=True):
        words = nonzero[start:end] % masks.shape[1]
        chosen[row] = _best_of(words, scores[row], mask)
        start = end
    return chosen


def _best_of(words: Index, scores: Scores, mask: MaskBits) -> Choice:
    """words: indices of all words of the mask that allow a token."""
    if not len(words):
        return 0, -np.inf
    num_words = len(scores) // WORD_BITS
    if words[-1] >= num_words:
        # The last scores do not fill a word.
        return _choose(scores, mask)
    candidates = scores[: num_words * WORD_BITS].reshape(-1, WORD_BITS).take(words, axis=0).reshape(-1)
    best = int(np.minimum(candidates, _highest_of(mask.take(words)), out=candidates).argmax())
    return int(words[best // WORD_BITS]) * WORD_BITS + best % WORD_BITS, float(candidates[best])


def _choose(scores: Scores, mask: MaskBits | None) -> Choice:
    best = int(scores.argmax())
    if mask is None or int(mask[best // WORD_BITS]) >> best % WORD_BITS & 1:
        return best, float(scores[best])
    highest = _highest_of(mask)[: len(scores)]
    best = int(np.minimum(scores, highest, out=highest).argmax())
    return best, float(highest[best])


def _highest_of(words: MaskBits) -> Scores:
    """Upper bounds of the scores that these words stand for. A branch per token takes up to 17 times as long."""
    return HIGHEST.take(words.view(np.uint8), axis=0).reshape(-1)
