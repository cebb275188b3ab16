"""The next token of each row: the best, or the best after noise. The vocabulary is never sorted where a few candidates
will do.

A way of choosing is made from draws, on the host, and sent to the device; there it is called with scores [N, vocab]
float32, which it leaves as they are, one row per draw.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.sampling.filters import Filters, keep
from engine_worker.sampling.gumbel_max import Race, by_torch
from engine_worker.sampling.noise import gumbel, noise_key, random_bits
from engine_worker.step import Draw

FEW, CANDIDATES = 64, 256
"""Tried first, the few where a small top-k says that they will do."""
MORE = 16
"""Times as many for rows whose filters let more pass, again and again."""


class Chosen(NamedTuple):
    """What came out, one entry per row."""

    tokens: Tensor
    """[N] int64."""
    valid: Tensor
    """[N] bool: whether there was anything to choose; not so where all is -inf, or something NaN or +inf."""
    short: Tensor | None = None
    """[N] bool: where the candidates were too few to tell."""


class Greedy(NamedTuple):
    """The most likely token; of equals the lowest id."""

    @staticmethod
    def of(_draws: Sequence[Draw]) -> "Greedy":
        """Needs nothing of them."""
        return Greedy()

    def __call__(self, scores: Tensor, *, widen: bool, race: Race = by_torch) -> Chosen:  # noqa: ARG002
        """Never short."""
        tokens = scores.argmax(dim=1)
        return Chosen(tokens, _finite(scores.gather(1, tokens.unsqueeze(1)).squeeze(1)))


class Filtered(NamedTuple):
    """Sampled from what top-k, top-p and min-p let pass."""

    temperature: Tensor
    """[N, 1] float32."""
    keys: Tensor
    """[N, 1] int64, of the noise."""
    filters: Filters
    unlimited: Tensor | None
    """[n] int64: the rows with a top-p and no top-k, which need the mass of the whole vocabulary; None: no row."""
    candidates: int

    @staticmethod
    def of(draws: Sequence[Draw]) -> "Filtered":
        """In order of the rows."""
        sampling = [draw.sampling for draw in draws]
        unlimited = [i for i, params in enumerate(sampling) if params.top_p < 1.0 and not params.top_k]
        return Filtered(
            _temperature(draws),
            _keys(draws),
            Filters.of(sampling),
            torch.tensor(unlimited) if unlimited else None,
            FEW if all(0 < params.top_k < FEW for params in sampling) else CANDIDATES,
        )

    def __call__(self, scores: Tensor, *, widen: bool, race: Race = by_torch) -> Chosen:  # noqa: ARG002
        """`widen`: rows for which the candidates are too few get more, and the host waits for the device to tell which;
        else they are told."""
        temperature, unlimited = self.temperature, self.unlimited
        mass = None if unlimited is None else _mass(scores, temperature, unlimited)
        return _filtered(scores, temperature, self.keys, self.filters, mass, self.candidates, widen=widen)


def _filtered(
    scores: Tensor,
    temperature: Tensor,
    keys: Tensor,
    filters: Filters,
    mass: Tensor | None,
    candidates: int,
    *,
    widen: bool,
) -> Chosen:
    size = scores.shape[1]
    values, ids = scores.topk(min(candidates, size), dim=1)
    scaled = values / temperature
    kept, needs_more = keep(scaled, filters, mass, whole=candidates >= size)
    noise = gumbel(random_bits(keys, ids))
    winners = noise.add_(scaled).masked_fill_(~kept, -torch.inf).argmax(dim=1, keepdim=True)
    tokens, valid = ids.gather(1, winners).squeeze(1), _finite(values[:, 0])
    short = needs_more & valid
    if not widen:
        return Chosen(tokens, valid, short)
    again = torch.nonzero(short).view(-1)
    if len(again):
        mass = None if mass is None else mass[again]
        rows = scores[again], temperature[again], keys[again], filters.rows(again), mass
        tokens[again] = _filtered(*rows, candidates * MORE, widen=True).tokens
    return Chosen(tokens, valid)


class Free(NamedTuple):
    """Sampled from the whole vocabulary, but for what min-p cuts off."""

    temperature: Tensor
    """[N, 1] float32."""
    keys: Tensor
    """[N, 1] int64, of the noise."""
    min_p: Tensor | None
    """[N, 1] float32; None where it is off in all rows."""

    @staticmethod
    def of(draws: Sequence[Draw]) -> "Free":
        """In order of the rows."""
        return Free(_temperature(draws), _keys(draws), Filters.of([draw.sampling for draw in draws]).min_p)

    def __call__(self, scores: Tensor, *, widen: bool, race: Race = by_torch) -> Chosen:  # noqa: ARG002
        """Never short."""
        best = scores.amax(dim=1, keepdim=True)
        threshold = None if self.min_p is None else best / self.temperature + self.min_p.log()
        peaks, tokens = race(scores, self.temperature, self.keys, threshold)
        winner = peaks.argmax(dim=1, keepdim=True)
        return Chosen(tokens.gather(1, winner).squeeze(1), _finite(best.squeeze(1)))


def _temperature(draws: Sequence[Draw]) -> Tensor:
    return torch.tensor([[draw.sampling.temperature] for draw in draws])


def _keys(draws: Sequence[Draw]) -> Tensor:
    return torch.tensor([[noise_key(draw.sampling.seed, draw.sequence, draw.position)] for draw in draws])


def _mass(scores: Tensor, temperature: Tensor, rows: Tensor) -> Tensor:
    """[N, 1] float64: sum over the vocabulary of exp((score - highest) / temperature) of these rows, as `filters.keep`
    needs it; 0 in the others."""
    chosen = scores.index_select(0, rows)
    scaled, best = chosen / temperature[rows], chosen.amax(dim=1, keepdim=True) / temperature[rows]
    masses = torch.zeros(len(scores), 1, dtype=torch.float64, device=scores.device)
    return masses.index_copy_(0, rows, scaled.sub_(best).exp_().sum(dim=1, keepdim=True, dtype=torch.float64))


def _finite(values: Tensor) -> Tensor:
    """Neither infinite nor NaN; one op less than torch's own."""
    return values.abs() < torch.inf
