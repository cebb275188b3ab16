"""The guided draws of a step: their masks are requested from the guide worker, then collected."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_worker.guided.masks import Masks
from engine_worker.sampling.logit_rules import StepRules
from engine_worker.sampling.masked import MaskedRows
from sluice.wire.errors import Fault


class GuidedDraws(NamedTuple):
    """Results of the guide worker."""

    draws: NDArray[np.int64]
    """[G]: draws with a mask."""
    masks: NDArray[np.uint32]
    """[M, words], one bit per token id; valid until masks are requested again."""
    mask_index: NDArray[np.int64]
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
