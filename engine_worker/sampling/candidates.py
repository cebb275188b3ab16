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
    """Called as the ways to choose a token are; the token is the most likely one."""

    most: int
    """That any of the draws asks for."""

    @staticmethod
    def of(draws: Sequence[Draw]) -> "Candidates":
        return Candidates(max(draw.candidates for draw in draws))

    def __call__(self, scores: Tensor, *, widen: bool, kernels: SamplingKernels = TORCH) -> Chosen:  # noqa: ARG002
        ids = most_likely(scores, min(self.most, scores.shape[1]))
        values = scores.gather(1, ids)
        logprobs = values - scores.logsumexp(dim=1, keepdim=True)
        return Chosen(ids[:, 0], finite(values[:, 0]), best=Best(ids, logprobs))


def most_likely(scores: Tensor, count: int) -> Tensor:
    """Ids of the highest scores [N, count], the lowest id first among equals: the first ones do not depend on `count`,
    which other draws raise. scores: [N, vocab] float32."""
    if scores.device.type != "cpu":
        return _most_likely_keys(scores, count)
    # On a CPU, keys take 16 times as long as scores; they are needed only where the last one has an equal.
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
    """By integers that are all different: the score's bits, then the id."""
    # The zero that is added makes -0.0 equal to 0.0.
    bits = (scores + 0.0).view(torch.int32)
    # As integers, floats are in their own order, but for the negative ones, which are reversed.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) + (MAX_ID - torch.arange(scores.shape[1], device=scores.device))
    return MAX_ID - (keys.topk(count, dim=1).values & MAX_ID)


class BestOfDraws(NamedTuple):
    """What `Candidates` found, by draw of the step."""

    draws: list[int]
    best: Best

    def entries(self) -> dict[int, list[tuple[int, float]]]:
        """Only once the tensors are on the host."""
        rows = zip(self.draws, self.best.ids.tolist(), self.best.logprobs.tolist(), strict=True)
        return {draw: list(zip(ids, logprobs, strict=True)) for draw, ids, logprobs in rows}
