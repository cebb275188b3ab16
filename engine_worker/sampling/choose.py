"""The next token of each row: the best, or the best after noise. The vocabulary is never sorted where a few candidates
will do.

Each function takes scores [N, vocab] float32, which it leaves as they are, and one draw per row; it returns the chosen
ids [N] int64 and whether there was anything to choose [N] bool (not so where all is -inf, or something NaN or +inf).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_worker.sampling import filters
from engine_worker.sampling.filters import Filters
from engine_worker.sampling.noise import MAX_GUMBEL, gumbel, noise_key, random_bits
from engine_worker.step import Draw

CANDIDATES = 256
"""Tried first; rows whose filters let more pass get 16 times as many."""
CELLS = 1 << 18
"""Scores at a time in `free`, so that they stay in the processor's cache."""


def greedy(scores: Tensor, _draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """The most likely token; of equals the lowest id."""
    tokens = scores.argmax(dim=1)
    return tokens, scores.gather(1, tokens.unsqueeze(1)).squeeze(1).isfinite()


def filtered(scores: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Sampled from what top-k, top-p and min-p let pass."""
    device = scores.device
    temperature, keys = _temperature(draws, device), _keys(draws, device)
    limits = Filters.of([draw.sampling for draw in draws], device)
    log_total = _log_totals(scores, temperature, draws)
    tokens = torch.zeros(len(draws), dtype=torch.int64, device=device)
    valid = torch.zeros(len(draws), dtype=torch.bool, device=device)
    pending = torch.arange(len(draws), device=device)
    width = CANDIDATES
    while len(pending):
        every = len(pending) == len(draws)
        width = min(width, scores.shape[1])
        values, ids = (scores if every else scores[pending]).topk(width, dim=1)
        scaled = values / temperature[pending]
        kept, needs_more = filters.keep(
            scaled, limits.select(pending), log_total[pending], whole=width == scores.shape[1]
        )
        valid[pending] = values[:, 0].isfinite()
        needs_more &= valid[pending]
        sums = scaled.double().masked_fill_(~kept, -torch.inf) + gumbel(random_bits(keys[pending], ids))
        tokens[pending] = ids.gather(1, sums.argmax(dim=1, keepdim=True)).squeeze(1)
        pending = pending[needs_more]
        width *= 16
    return tokens, valid


def free(scores: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Sampled from the whole vocabulary, but for what min-p cuts off."""
    rows = max(1, CELLS // scores.shape[1])
    parts = [_free(scores[i : i + rows], draws[i : i + rows]) for i in range(0, len(draws), rows)]
    tokens, valid = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(valid)


def _free(scores: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Noise is bounded: only tokens within reach of the most likely one's sum, whose noise is worked out first, get
    theirs."""
    keys = _keys(draws, scores.device)
    min_p_log = torch.tensor([[draw.sampling.min_p] for draw in draws], device=scores.device).log_()
    scaled = scores / _temperature(draws, scores.device)
    best, top = scaled.max(dim=1, keepdim=True)
    reach = (best.double() + gumbel(random_bits(keys, top)) - MAX_GUMBEL).float()
    reach = torch.nextafter(reach, torch.full_like(reach, -torch.inf))
    rows, ids = torch.nonzero(scaled >= torch.maximum(reach, best + min_p_log), as_tuple=True)
    sums = scaled[rows, ids].double() + gumbel(random_bits(keys.squeeze(1)[rows], ids))
    highest = sums.new_full((len(draws),), -torch.inf).scatter_reduce_(0, rows, sums, "amax")
    won = sums == highest[rows]
    tokens = top.squeeze(1).scatter_reduce_(0, rows[won], ids[won], "amin", include_self=False)
    return tokens, best.squeeze(1).isfinite()


def _temperature(draws: Sequence[Draw], device: torch.device) -> Tensor:
    """[N, 1]."""
    return torch.tensor([[draw.sampling.temperature] for draw in draws], device=device)


def _keys(draws: Sequence[Draw], device: torch.device) -> Tensor:
    """[N, 1]."""
    keys = [[noise_key(draw.sampling.seed, draw.sequence, draw.position)] for draw in draws]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def _log_totals(scores: Tensor, temperature: Tensor, draws: Sequence[Draw]) -> Tensor:
    """[N, 1] float64: logsumexp over the vocabulary, for the rows where top-p needs it."""
    totals = torch.zeros(len(draws), 1, dtype=torch.float64, device=scores.device)
    rows = [i for i, draw in enumerate(draws) if draw.sampling.top_p < 1.0 and not draw.sampling.top_k]
    if rows:
        index = torch.tensor(rows, device=scores.device)
        totals[index] = (scores[index] / temperature[index]).logsumexp(dim=1, keepdim=True).double()
    return totals
