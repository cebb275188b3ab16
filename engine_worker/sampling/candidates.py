"""The most likely tokens of a beam, with their log-probabilities after all edits."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.sampling.choose import Best, Chosen, finite
from engine_worker.sampling.fused import TORCH, SamplingKernels
from engine_worker.step import Draw

MAX_ID = (1 << 32) - 1


class Candidates(NamedTuple):
    """A way to choose a token, for beams: it finds the most likely tokens, and chooses the first."""

    most: int
    """The most candidates that any of the draws requests."""

    @staticmethod
    def of(draws: Sequence[Draw]) -> "Candidates":
        return Candidates(max(draw.candidates for draw in draws))

    def __call__(self, scores: Tensor, *, widen: bool, kernels: SamplingKernels = TORCH) -> Chosen:  # noqa: ARG002
        ids = most_likely(scores, min(self.most, scores.shape[1]))
        values = scores.gather(1, ids)
        logprobs = values - scores.logsumexp(dim=1, keepdim=True)
        return Chosen(ids[:, 0], finite(values[:, 0]), best=Best(ids, logprobs))


def most_likely(scores: Tensor, count: int) -> Tensor:
    """Ids of the highest scores [N, count], the lowest id first among equals. So the first ids do not depend on
    `count`, which other draws in the step may raise. scores: [N, vocab] float32."""
    if scores.device.type != "cpu":
        return _most_likely_keys(scores, count)
    # On a CPU, keys take 16 times as long as scores; they are needed only where the last score is tied with the next.
    values, ids = scores.topk(min(count + 1, scores.shape[1]), dim=1)
    tied = (values[:, count - 1] == values[:, -1]) & values[:, -1].isfinite()
    ids = ids[:, :count].sort(dim=1).values
    order = scores.gather(1, ids).argsort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    if count < scores.shape[1] and tied.any():
        rows = tied.nonzero().squeeze(1)
        ids[rows] = _most_likely_keys(scores[rows], count)
    return ids


def _most_likely_keys(scores: Tensor, count: int) -> Tensor:
    """Sorts by distinct integers: the score's bits, then the id."""
    # Adding 0.0 turns -0.0 into 0.0.
    bits = (scores + 0.0).view(torch.int32)
    # Read as integers, floats keep their order, except that negative ones are reversed.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) + (MAX_ID - torch.arange(scores.shape[1], device=scores.device))
    return MAX_ID - (keys.topk(count, dim=1).values & MAX_ID)


class BestOfDraws(NamedTuple):
    """The candidates of some draws of a step."""

    draws: list[int]
    best: Best

    def entries(self) -> dict[int, list[tuple[int, float]]]:
        """By draw: (token id, logprob), the best first. Call only once the tensors are on the host."""
        rows = zip(self.draws, self.best.ids.tolist(), self.best.logprobs.tolist(), strict=True)
        return {draw: list(zip(ids, logprobs, strict=True)) for draw, ids, logprobs in rows}
