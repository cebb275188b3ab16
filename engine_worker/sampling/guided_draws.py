"""The guided draws of a step: their masks are asked for, then collected."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_worker.guided.masks import Masks
from engine_worker.sampling.masked import MaskedRows
from engine_worker.sampling.programs import StepPrograms
from sluice.ring.errors import Fault


class GuidedDraws(NamedTuple):
    """What the guide worker has found."""

    draws: NDArray[np.int64]
    """[G]: those with a mask."""
    masks: NDArray[np.uint32]
    """[M, words], one bit per token id; valid until masks are asked for again."""
    own: NDArray[np.int64]
    """[G]: each draw's mask."""
    faults: Mapping[int, Fault]
    """By draw."""
    complete: Sequence[int]
    """Draws before which their sequences have ended."""
    later: Sequence[int]
    """Draws whose guides are not ready."""

    def among(self, draws: list[int] | None) -> MaskedRows | None:
        """As rows of a group with these draws, in order; None: all draws. Returns None if no row has a mask."""
        if draws is None:
            return MaskedRows(self.draws, self.masks, self.own) if len(self.own) else None
        rows = np.searchsorted(draws, self.draws)
        found = np.take(draws, rows, mode="clip") == self.draws
        return MaskedRows(rows[found], self.masks, self.own[found]) if found.any() else None


class RequestedMasks(NamedTuple):
    """The masks of a step's guided draws, on their way."""

    masks: Masks
    draws: NDArray[np.int64]

    @staticmethod
    def of(masks: Masks, programs: StepPrograms, before: Sequence[int] | None) -> "RequestedMasks | None":
        """`before`: see `StepPrograms.advanced`. None: no draw is guided."""
        asked = programs.guided(before)
        if not asked:
            return None
        masks.ask(list(asked.values()))
        return RequestedMasks(masks, np.array(list(asked)))

    def collect(self) -> GuidedDraws:
        masks, faults, complete, unread, later = self.masks.collect()
        without = [*faults, *complete, *unread, *later]
        own = np.arange(len(self.draws))
        if not without:
            return GuidedDraws(self.draws, masks, own, {}, (), ())
        own = np.delete(own, without)
        by_draw = {int(self.draws[i]): fault for i, fault in faults.items()}
        ended, late = (self.draws[list(slots)].tolist() for slots in (complete, later))
        return GuidedDraws(self.draws[own], masks, own, by_draw, ended, late)
