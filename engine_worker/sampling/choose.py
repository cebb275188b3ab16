"""Three ways to choose a token from scores: greedy, sampled through filters, sampled from the whole vocabulary.

Each is built from draws on the host, sent to the device, and called there with scores [N, vocab] float32, one row per
draw, which it does not modify. The vocabulary is never sorted where a few candidates suffice.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

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
from sluice.ring.params import SamplingParams

FEW, CANDIDATES = 64, 256
"""Most likely tokens that are looked at first: FEW if every row has a smaller top-k, which makes them enough."""
MORE = 16
"""Growth factor of the candidates, repeatedly, for rows whose filters let more pass."""


class Best(NamedTuple):
    """The K most likely tokens of N rows."""

    ids: Tensor
    """[N, K] int64."""
    logprobs: Tensor
    """[N, K] float32, descending."""


class Chosen(NamedTuple):
    """The tokens, one per row."""

    tokens: Tensor
    """[N] int64."""
    valid: Tensor
    """[N] bool: whether there was a token to choose; false if all scores are -inf, or one is NaN or +inf."""
    short: Tensor | None = None
    """[N] bool: the candidates were too few to decide, so the token may be wrong."""
    best: Best | None = None
    """Of beams."""


class Greedy(NamedTuple):
    """The most likely token; the lowest id among equals."""

    @staticmethod
    def of(_draws: Sequence[Draw]) -> "Greedy":
        return Greedy()

    def __call__(self, scores: Tensor, *, widen: bool, gumbel_max: GumbelMax = torch_gumbel_max) -> Chosen:  # noqa: ARG002
        if is_on_host(scores):
            # Arrays until the end: each step to a tensor and back takes half a microsecond.
            best, at = highest_on_host(scores.numpy())
            return Chosen(torch.from_numpy(at), torch.from_numpy(np.isfinite(best)))
        peaks, tokens = highest(scores)
        return Chosen(tokens, finite(peaks))


class Filters(NamedTuple):
    """Each [N, 1], a row per draw."""

    top_k: Tensor
    """int64; 0 is off."""
    top_p: Tensor | None
    """float64; 1 is off. None if it is off in all rows."""
    min_p: Tensor | None
    """float32; 0 is off. None if it is off in all rows."""

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> "Filters":
        top_p, min_p = [[p.top_p] for p in params], [[p.min_p] for p in params]
        return Filters(
            torch.tensor([[p.top_k] for p in params]),
            torch.tensor(top_p, dtype=torch.float64) if min(top_p) < [1.0] else None,
            torch.tensor(min_p) if max(min_p) > [0.0] else None,
        )

    def rows(self, index: Tensor | slice) -> "Filters":
        """The rows at index, [n] int64 or a slice."""
        top_p, min_p = (None if column is None else column[index] for column in (self.top_p, self.min_p))
        return Filters(self.top_k[index], top_p, min_p)


def keep(scaled: Tensor, filters: Filters, mass: Tensor | None, *, whole: bool) -> tuple[Tensor, Tensor]:
    """Which candidates pass [N, C] bool, and which rows need more candidates to decide [N] bool.

    scaled [N, C]: logits over temperature of the most likely tokens, descending. mass [N, 1]: sum over the vocabulary
    of exp(scaled logit - the highest), used in rows with a top-p and no top-k. whole: the candidates are the
    vocabulary.
    """
    limited = filters.top_k > 0
    last = torch.where(limited, filters.top_k, scaled.shape[1]).clamp_(max=scaled.shape[1]) - 1
    kept = scaled >= scaled.gather(1, last)
    # While the last candidate passes, tokens beyond the candidates might pass too.
    needs_more = limited.squeeze(1) & kept[:, -1]
    if filters.top_p is not None:
        weights = (scaled.double() - scaled[:, :1]).exp_().masked_fill_(~kept, 0.0)
        total = weights.sum(dim=1, keepdim=True)
        total = total if mass is None else torch.where(limited, total, mass)
        # The token that crosses top_p is kept, as in transformers: only the mass before a token counts.
        before = weights.cumsum(dim=1) - weights
        inside = (before < filters.top_p * total) | (filters.top_p >= 1.0)
        # A token as likely as the last one inside is kept too, wherever the sort has put it.
        # In a row of only -inf or NaN nothing is inside; the caller marks it as not valid.
        smallest = scaled.gather(1, (inside.sum(dim=1, keepdim=True) - 1).clamp_(min=0))
        kept &= scaled >= smallest
    if filters.min_p is not None:
        kept &= scaled >= scaled[:, :1] + filters.min_p.log()
    needs_more |= kept[:, -1]
    # Beyond a candidate of -inf nothing can pass.
    needs_more &= scaled[:, -1] > -torch.inf
    return kept, torch.zeros_like(needs_more) if whole else needs_more


class Filtered(NamedTuple):
    """Sampled from the tokens that top-k, top-p and min-p let pass."""

    temperature: Tensor
    """[N, 1] float32."""
    keys: Tensor
    """[N, 1] int64, see `noise_key`."""
    filters: Filters
    unlimited: Tensor | None
    """[n] int64: rows with a top-p and no top-k, which need the mass of the whole vocabulary; None: no row."""
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

    def __call__(self, scores: Tensor, *, widen: bool, gumbel_max: GumbelMax = torch_gumbel_max) -> Chosen:  # noqa: ARG002
        """`widen`: give rows more candidates while they have too few, which makes the host wait for the device. Else
        such rows are reported in `Chosen.short`."""
        mass = None if self.unlimited is None else _mass(scores, self.temperature, self.unlimited)
        return self._choose(scores, mass, widen=widen)

    def _choose(self, scores: Tensor, mass: Tensor | None, *, widen: bool) -> Chosen:
        """mass: see `keep`."""
        size = scores.shape[1]
        values, ids = scores.topk(min(self.candidates, size), dim=1)
        scaled = values / self.temperature
        kept, needs_more = keep(scaled, self.filters, mass, whole=self.candidates >= size)
        # Noise depends on the token id alone, so a token gets the same in any number of candidates.
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
        """The rows [n] int64, with MORE times the candidates."""
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

    def __call__(self, scores: Tensor, *, widen: bool, gumbel_max: GumbelMax = torch_gumbel_max) -> Chosen:  # noqa: ARG002
        # min-p is relative to the most likely token, in logits: log(min_p) below the best.
        best = scores.amax(dim=1, keepdim=True)
        threshold = None if self.min_p is None else best / self.temperature + self.min_p.log()
        peaks, tokens = gumbel_max(scores, self.temperature, self.keys, threshold)
        winner = peaks.argmax(dim=1, keepdim=True)
        return Chosen(tokens.gather(1, winner).squeeze(1), finite(best.squeeze(1)))


def temperature_of(draws: Sequence[Draw]) -> Tensor:
    return torch.tensor([[draw.sampling.temperature] for draw in draws])


def keys_of(draws: Sequence[Draw]) -> Tensor:
    return torch.tensor([[noise_key(draw.sampling.seed, draw.sequence, draw.position)] for draw in draws])


def _mass(scores: Tensor, temperature: Tensor, rows: Tensor) -> Tensor:
    """[N, 1] float64, for `keep`: sum over the vocabulary of exp((score - highest) / temperature) in these
    rows, 0 in the others."""
    chosen = scores.index_select(0, rows)
    scaled, best = chosen / temperature[rows], chosen.amax(dim=1, keepdim=True) / temperature[rows]
    masses = torch.zeros(len(scores), 1, dtype=torch.float64, device=scores.device)
    return masses.index_copy_(0, rows, scaled.sub_(best).exp_().sum(dim=1, keepdim=True, dtype=torch.float64))


def finite(values: Tensor) -> Tensor:
    """Neither infinite nor NaN."""
    if is_on_host(values):
        # A call of numpy takes half the time of one of torch.
        return torch.from_numpy(np.isfinite(values.numpy()))
    # One operation fewer than torch.isfinite.
    return values.abs() < torch.inf
