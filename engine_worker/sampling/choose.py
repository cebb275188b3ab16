"""Ways to choose a token from scores: greedy, sampled through filters, sampled from the whole vocabulary; and, for
beams, the most likely tokens.

Each is built from draws on the host, sent to the device, and called there with scores [N, vocab] float32, one row per
draw, which it does not modify. The vocabulary is never sorted where a few candidates suffice.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine_worker.sampling.filters import Filters, Thresholds, keep
from engine_worker.sampling.host import is_on_host
from engine_worker.sampling.noise import (
    GumbelMax,
    gumbel,
    highest,
    highest_on_host,
    noise_key,
    random_bits,
    torch_gumbel_max,
)
from engine_worker.step import Draw

FEW, CANDIDATES = 64, 256
"""Number of most likely tokens that are examined first: FEW if every row has a smaller top-k, so that FEW suffice."""
MORE = 16
"""Factor by which the candidates grow, repeatedly, in rows whose filters let more pass."""
MAX_ID = (1 << 32) - 1


class SamplingKernels(NamedTuple):
    """The sampling operations that a kernel may compute on a GPU."""

    gumbel_max: GumbelMax
    thresholds: Thresholds | None
    """None: filters examine only the most likely tokens, which may be too few; see `Filtered`."""


TORCH = SamplingKernels(torch_gumbel_max, None)


class Best(NamedTuple):
    """The K most likely tokens of N rows."""

    ids: Tensor
    """[N, K] int64."""
    logprobs: Tensor
    """[N, K] float32, descending."""


class Chosen(NamedTuple):
    """The chosen tokens, one per row."""

    tokens: Tensor
    """[N] int64."""
    valid: Tensor
    """[N] bool: whether there was a token to choose; false if all scores are -inf, or one is NaN or +inf."""
    short: Tensor | None = None
    """[N] bool: whether the candidates were too few to decide, so that the token may be wrong."""
    best: Best | None = None
    """Candidates of beams."""


class Greedy(NamedTuple):
    """The most likely token; the lowest id among equals."""

    @staticmethod
    def of(_draws: Sequence[Draw]) -> "Greedy":
        return Greedy()

    def __call__(self, scores: Tensor, *, widen: bool, kernels: SamplingKernels = TORCH) -> Chosen:  # noqa: ARG002
        if is_on_host(scores):
            # Stay with arrays until the end: each conversion to a tensor and back takes half a microsecond.
            best, tokens_on_host = highest_on_host(scores.numpy())
            return Chosen(torch.from_numpy(tokens_on_host), torch.from_numpy(np.isfinite(best)))
        peaks, tokens = highest(scores)
        return Chosen(tokens, finite(peaks))


class Filtered(NamedTuple):
    """Sampled from the tokens that top-k, top-p and min-p let pass."""

    temperature: Tensor
    """[N, 1] float32."""
    keys: Tensor
    """[N, 1] int64, see `noise_key`."""
    filters: Filters
    unlimited: Tensor | None
    """[n] int64: rows with a top-p and no top-k, which need the mass of the whole vocabulary; None if none does."""
    candidates: int

    @staticmethod
    def of(draws: Sequence[Draw]) -> "Filtered":
        sampling = [draw.sampling for draw in draws]
        unlimited = [i for i, params in enumerate(sampling) if params.top_p < 1.0 and not params.top_k]
        return Filtered(
            temperature_of(draws),
            keys_of(draws),
            Filters.of(sampling),
            torch.tensor(unlimited) if unlimited else None,
            FEW if all(0 < params.top_k < FEW for params in sampling) else CANDIDATES,
        )

    def __call__(self, scores: Tensor, *, widen: bool, kernels: SamplingKernels = TORCH) -> Chosen:
        """`widen`: give rows more candidates while they have too few, which makes the host wait for the device.
        Otherwise report such rows in `Chosen.short`. With a kernel of thresholds no candidates are needed."""
        if kernels.thresholds is not None:
            return self._by_threshold(scores, kernels.thresholds, kernels.gumbel_max)
        mass = None if self.unlimited is None else _mass(scores, self.temperature, self.unlimited)
        return self._choose(scores, mass, widen=widen)

    def _by_threshold(self, scores: Tensor, thresholds: Thresholds, gumbel_max: GumbelMax) -> Chosen:
        threshold, valid = thresholds(scores, self.temperature, self.filters)
        return Chosen(_winners(*gumbel_max(scores, self.temperature, self.keys, threshold)), valid)

    def _choose(self, scores: Tensor, mass: Tensor | None, *, widen: bool) -> Chosen:
        """mass: see `keep`."""
        size = scores.shape[1]
        values, ids = scores.topk(min(self.candidates, size), dim=1)
        scaled = values / self.temperature
        kept, needs_more = keep(scaled, self.filters, mass, whole=self.candidates >= size)
        # Noise depends on the token id alone, so a token gets the same noise for any number of candidates.
        noise = gumbel(random_bits(self.keys, ids))
        winners = noise.add_(scaled).masked_fill_(~kept, -torch.inf).argmax(dim=1, keepdim=True)
        tokens, valid = ids.gather(1, winners).squeeze(1), finite(values[:, 0])
        short = needs_more & valid
        if not widen:
            return Chosen(tokens, valid, short)
        again = torch.nonzero(short).view(-1)
        if len(again):
            mass = None if mass is None else mass[again]
            tokens[again] = self._with_more(again)._choose(scores[again], mass, widen=True).tokens
        return Chosen(tokens, valid)

    def _with_more(self, rows: Tensor) -> "Filtered":
        """For `rows` [n] int64, with MORE times the candidates."""
        filters, candidates = self.filters.rows(rows), self.candidates * MORE
        return Filtered(self.temperature[rows], self.keys[rows], filters, None, candidates)


class Unfiltered(NamedTuple):
    """Sampled from the whole vocabulary, except what min-p cuts off. Temperature and keys as in `Filtered`."""

    temperature: Tensor
    keys: Tensor
    min_p: Tensor | None
    """As in `Filters`."""

    @staticmethod
    def of(draws: Sequence[Draw]) -> "Unfiltered":
        return Unfiltered(temperature_of(draws), keys_of(draws), Filters.of([draw.sampling for draw in draws]).min_p)

    def __call__(self, scores: Tensor, *, widen: bool, kernels: SamplingKernels = TORCH) -> Chosen:  # noqa: ARG002
        # min-p is relative to the most likely token, in logits: log(min_p) below the best.
        best = scores.amax(dim=1, keepdim=True)
        threshold = None if self.min_p is None else best / self.temperature + self.min_p.log()
        tokens = _winners(*kernels.gumbel_max(scores, self.temperature, self.keys, threshold))
        return Chosen(tokens, finite(best.squeeze(1)))


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


def temperature_of(draws: Sequence[Draw]) -> Tensor:
    return torch.tensor([[draw.sampling.temperature] for draw in draws])


def keys_of(draws: Sequence[Draw]) -> Tensor:
    return torch.tensor([[noise_key(draw.sampling.seed, draw.sequence, draw.position)] for draw in draws])


def _winners(peaks: Tensor, tokens: Tensor) -> Tensor:
    """Tokens [N] of the highest peaks, from the results of a `GumbelMax`."""
    return tokens.gather(1, peaks.argmax(dim=1, keepdim=True)).squeeze(1)


def _mass(scores: Tensor, temperature: Tensor, rows: Tensor) -> Tensor:
    """[N, 1] float64, for `keep`: sum over the vocabulary of exp((score - highest) / temperature) in `rows`, 0 in all
    other rows."""
    chosen = scores.index_select(0, rows)
    scaled, best = chosen / temperature[rows], chosen.amax(dim=1, keepdim=True) / temperature[rows]
    masses = torch.zeros(len(scores), 1, dtype=torch.float64, device=scores.device)
    return masses.index_copy_(0, rows, scaled.sub_(best).exp_().sum(dim=1, keepdim=True, dtype=torch.float64))


def finite(values: Tensor) -> Tensor:
    """Whether each value is neither infinite nor NaN."""
    if is_on_host(values):
        # A call of numpy takes half the time of one of torch.
        return torch.from_numpy(np.isfinite(values.numpy()))
    # One operation fewer than torch.isfinite.
    return values.abs() < torch.inf
