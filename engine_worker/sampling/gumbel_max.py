"""Scores plus noise over the whole vocabulary, part by part: who leads in each."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine_worker.sampling.noise import gumbel, random_bits

Race = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(scores, temperature, keys, threshold): scores [N, vocab] float32, over temperature [N, 1] float32, plus the noise of
keys [N, 1] int64; tokens below the threshold [N, 1] float32, if there is one, are out -> the highest sum in each of P
parts of the vocabulary, [N, P] float64, and its token, [N, P] int64, the lowest of equals. A row with no number or NaN
gets any tokens."""

CELLS, MIN_COLUMNS = {"cpu": 1 << 15, "cuda": 1 << 24}, 1 << 9
"""Scores of a part: so that they stay in the processor's cache, and so that they fit into memory."""


def by_torch(scores: Tensor, temperature: Tensor, keys: Tensor, threshold: Tensor | None) -> tuple[Tensor, Tensor]:
    """A `Race`. Every token gets its noise: bounding the noise and skipping tokens that cannot win costs more than it
    saves."""
    device, size = scores.device, scores.shape[1]
    columns = max(CELLS[device.type] // len(scores), MIN_COLUMNS)
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
    return torch.stack(peaks, dim=1), torch.stack(tokens, dim=1)
