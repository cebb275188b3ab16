"""A step's draws: which row of the logits each is sampled from."""

from collections.abc import Sequence
from typing import NamedTuple

from engine_worker.sampling.guided_draws import RequestedMasks
from engine_worker.sampling.sampler import SamplingPlan
from engine_worker.step import Draw, Slice


class SampledDraws(NamedTuple):
    """The draws of a step and how they are sampled."""

    draws: list[Draw]
    plan: SamplingPlan
    masks: RequestedMasks | None = None
    """Masks that were requested when the step was launched; None: they are requested when it is computed."""


class StepDraws(NamedTuple):
    """D draws from R rows of logits: one row per slice that draws, and one more for each of its drafts."""

    draws: list[Draw]
    rows: list[int]
    """[D]: each draw's row."""
    num_rows: int
    """R."""
    follows: dict[int, int]
    """For draws whose last output token is still being sampled: the draw of the previous step that samples it."""

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> "StepDraws":
        draws: list[Draw] = []
        rows: list[int] = []
        follows: dict[int, int] = {}
        num_rows = 0
        for part in slices:
            if not part.draws:
                continue
            for draw in part.draws:
                if part.follows is not None:
                    follows[len(draws)] = part.follows
                draws.append(draw)
                # In steps of the draft model `drafts` is 0: its cache has all draft tokens before a draw but the last.
                rows.append(num_rows + (len(draw.drafted) if part.drafts else 0))
            num_rows += 1 + part.drafts
        return cls(draws, rows, num_rows, follows)

    def plan(self, vocab_size: int) -> SamplingPlan:
        """Copies what it needs of the draws, which the engine may change afterwards."""
        return SamplingPlan.of(self.draws, self.rows, self.num_rows, vocab_size, self.follows)
