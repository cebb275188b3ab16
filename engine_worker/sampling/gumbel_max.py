"""The Gumbel-max trick over the whole vocabulary: add noise to every score and keep the maxima."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine_worker.sampling.noise import gumbel, random_bits

GumbelMax = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(scores [N, vocab] float32, temperature [N, 1] float32, keys [N, 1] int64, threshold [N, 1] float32 or None).

Scores over temperature plus the noise of the keys; tokens below the threshold are excluded. The vocabulary is processed
in P parts -> each part's maximum [N, P] float64 and its token [N, P] int64, the lowest among equals. Rows with NaN, or
without a finite score, get arbitrary tokens."""

PART_ELEMENTS, MIN_COLUMNS = {"cpu": 1 << 15, "cuda": 1 << 24}, 1 << 9
"""Scores per part: few enough for the CPU's cache, or for the GPU's memory."""


def torch_gumbel_max(
    scores: Tensor, temperature: Tensor, keys: Tensor, threshold: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A `GumbelMax` in plain torch."""
    # Every token gets its noise: bounding it, to skip tokens that cannot win, was measured to cost more than it saves.
    device, size = scores.device, scores.shape[1]
    columns = max(PART_ELEMENTS[device.type] // len(scores), MIN_COLUMNS)
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
