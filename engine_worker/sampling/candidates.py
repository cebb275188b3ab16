"""The most likely tokens of a beam, with their log-probabilities after all edits."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine_worker.sampling.choose import Best, Chosen, finite
from engine_worker.sampling.noise import GumbelMax, torch_gumbel_max
from engine_worker.step import Draw


class Candidates(NamedTuple):
    """Called as the ways to choose a token are; the token is the most likely one."""

    most: int
    """That any of the draws asks for."""

    @staticmethod
    def of(draws: Sequence[Draw]) -> "Candidates":
        return Candidates(max(draw.candidates for draw in draws))

    def __call__(self, scores: Tensor, *, widen: bool, gumbel_max: GumbelMax = torch_gumbel_max) -> Chosen:  # noqa: ARG002
        values, ids = scores.topk(min(self.most, scores.shape[1]), dim=1)
        logprobs = values - scores.logsumexp(dim=1, keepdim=True)
        return Chosen(ids[:, 0], finite(values[:, 0]), best=Best(ids, logprobs))


class BestOfDraws(NamedTuple):
    """What `Candidates` found, by draw of the step."""

    draws: list[int]
    best: Best

    def entries(self) -> dict[int, list[tuple[int, float]]]:
        """Only once the tensors are on the host. The lowest id first among equals."""
        rows = zip(self.draws, self.best.ids.tolist(), self.best.logprobs.tolist(), strict=True)
        return {
            draw: sorted(zip(ids, logprobs, strict=True), key=lambda entry: (-entry[1], entry[0]))
            for draw, ids, logprobs in rows
        }
