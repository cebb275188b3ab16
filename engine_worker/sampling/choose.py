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
from engine_worker.sampling.noise import gumbel, noise_key, random_bits
from engine_worker.step import Draw

FEW, CANDIDATES = 64, 256
"""Tried first, the few where a small top-k says that they will do."""
MORE = 16
"""Times as many for rows whose filters let more pass, again and again."""
CELLS, MIN_COLUMNS = 1 << 15, 1 << 9
"""Scores that `free` takes at a time, so that they stay in the processor's cache."""


def greedy(scores: Tensor, _draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """The most likely token; of equals the lowest id."""
    tokens = scores.argmax(dim=1)
    return tokens, _finite(scores.gather(1, tokens.unsqueeze(1)).squeeze(1))


def filtered(scores: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Sampled from what top-k, top-p and min-p let pass."""
    return _filtered(scores, draws, FEW if all(0 < draw.sampling.top_k < FEW for draw in draws) else CANDIDATES)


def _filtered(scores: Tensor, draws: Sequence[Draw], candidates: int) -> tuple[Tensor, Tensor]:
    device, size = scores.device, scores.shape[1]
    temperature = _temperature(draws, device)
    values, ids = scores.topk(min(candidates, size), dim=1)
    scaled = values / temperature
    limits = Filters.of([draw.sampling for draw in draws], device)
    mass = _mass(scores, scaled[:, :1], temperature, draws)
    kept, needs_more = filters.keep(scaled, limits, mass, whole=candidates >= size)
    noise = gumbel(random_bits(_keys(draws, device), ids))
    winners = noise.add_(scaled).masked_fill_(~kept, -torch.inf).argmax(dim=1, keepdim=True)
    tokens, valid = ids.gather(1, winners).squeeze(1), _finite(values[:, 0])
    again = torch.nonzero(needs_more & valid).view(-1)
    if len(again):
        wider, _ = _filtered(scores[again], [draws[i] for i in again.tolist()], candidates * MORE)
        tokens[again] = wider
    return tokens, valid


def free(scores: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Sampled from the whole vocabulary, but for what min-p cuts off.

    Every token gets its noise: bounding the noise and skipping tokens that cannot win costs more than it saves.
    """
    device, size = scores.device, scores.shape[1]
    temperature, keys = _temperature(draws, device), _keys(draws, device)
    best = scores.amax(dim=1, keepdim=True)
    threshold = _min_p_threshold(best / temperature, draws)
    columns = max(CELLS // len(draws), MIN_COLUMNS)
    peaks, tokens = [], []
    for begin in range(0, size, columns):
        scaled = scores[:, begin : begin + columns] / temperature
        ids = torch.arange(begin, begin + scaled.shape[1], device=device)
        sums = gumbel(random_bits(keys, ids)).add_(scaled)
        if threshold is not None:
            sums.masked_fill_(scaled < threshold, -torch.inf)
        peak, column = sums.max(dim=1)
        peaks.append(peak)
        tokens.append(column + begin)
    winner = torch.stack(peaks, dim=1).argmax(dim=1, keepdim=True)
    return torch.stack(tokens, dim=1).gather(1, winner).squeeze(1), _finite(best.squeeze(1))


def _min_p_threshold(best: Tensor, draws: Sequence[Draw]) -> Tensor | None:
    """[N, 1], of logits over temperature; None where min-p is off in all rows."""
    if not any(draw.sampling.min_p for draw in draws):
        return None
    return best + torch.tensor([[draw.sampling.min_p] for draw in draws], device=best.device).log_()


def _temperature(draws: Sequence[Draw], device: torch.device) -> Tensor:
    """[N, 1]."""
    return torch.tensor([[draw.sampling.temperature] for draw in draws], device=device)


def _keys(draws: Sequence[Draw], device: torch.device) -> Tensor:
    """[N, 1]."""
    keys = [[noise_key(draw.sampling.seed, draw.sequence, draw.position)] for draw in draws]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def _mass(scores: Tensor, best: Tensor, temperature: Tensor, draws: Sequence[Draw]) -> Tensor | None:
    """[N, 1] float64: sum over the vocabulary of exp(score / temperature - best) where `filters.keep` needs it."""
    rows = [i for i, draw in enumerate(draws) if draw.sampling.top_p < 1.0 and not draw.sampling.top_k]
    if not rows:
        return None
    index = torch.tensor(rows, device=scores.device)
    weights = (scores[index] / temperature[index]).sub_(best[index]).exp_()
    masses = torch.zeros(len(draws), 1, dtype=torch.float64, device=scores.device)
    masses[index] = weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    return masses


def _finite(values: Tensor) -> Tensor:
    """Neither infinite nor NaN; one op less than torch's own."""
    return values.abs() < torch.inf
