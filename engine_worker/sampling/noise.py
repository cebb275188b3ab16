"""Gumbel noise that is a pure function of (seed, sequence, position, token id).

Adding independent Gumbel noise to log-probabilities and taking the maximum samples from the distribution: the
Gumbel-max trick (Gumbel 1954). Counter-based noise makes the sample independent of batch, chunking, preemption and
machine. Seed and sequence seed a SplitMix64 generator (Steele et al. 2014); its position-th output seeds a second
generator, whose (token id)-th output is the token's randomness.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.sampling.host import is_on_host
from sluice.wire.params import derive_seed

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

BITS = 31
"""Random bits per token: u = (bits + 1/2) / 2**31 is exact in float64, and never 0 or 1."""

GumbelMax = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(scores [N, vocab] float32, temperature [N, 1] float32, keys [N, 1] int64, threshold [N, 1] float32 or None)
-> (maxima [N, P] float64, tokens [N, P] int64).

Adds the noise of the keys to scores over temperature; tokens below the threshold are excluded. The vocabulary is
processed in P parts: returns each part's maximum and its token, the lowest id among equals. Rows with NaN, or without a
finite score, get arbitrary tokens."""

PART_ELEMENTS, MIN_COLUMNS = {"cpu": 1 << 15, "cuda": 1 << 24}, 1 << 9
"""Scores per part, few enough for the CPU's cache or the GPU's memory; and columns of a part, at least."""


def noise_key(seed: int, sequence: int, position: int) -> int:
    """Key of one draw: the seed of its tokens' generator, as a signed 64-bit integer."""
    return _signed(_mix_int(_mix_int(derive_seed(seed, sequence)) + (position + 1) * GOLDEN))


def random_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Int64 keys and token ids, broadcast -> int64 in [0, 2**31).

    SplitMix64's finalizer in wrapping int64 arithmetic, without its last xor-shift, which does not change the upper 31
    bits.
    """
    x = (token_ids + 1) * _signed(GOLDEN) + keys
    x.bitwise_xor_(_shifted(x, 30)).mul_(_signed(FACTORS[0]))
    x.bitwise_xor_(_shifted(x, 27)).mul_(_signed(FACTORS[1]))
    return _shifted(x, 64 - BITS)


def uniform(keys: Tensor) -> Tensor:
    """One float64 in (0, 1) per key, independent of the noise of the key's tokens."""
    # This output of the key's generator belongs to no token id.
    return random_bits(keys, torch.full_like(keys, -1)).double().add_(0.5).mul_(2.0**-BITS)


def gumbel(bits: Tensor) -> Tensor:
    """Random bits -> float64 noise, -log(-log(u))."""
    # In float64 the two logarithms are accurate to 1e-15, so that all machines agree on the winner.
    return bits.double().add_(0.5).mul_(2.0**-BITS).log_().neg_().log_().neg_()


def torch_gumbel_max(
    scores: Tensor, temperature: Tensor, keys: Tensor, threshold: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A `GumbelMax` in plain torch."""
    # Noise is computed for every token: bounding it to skip tokens that cannot win was measured to be slower.
    device, size = scores.device, scores.shape[1]
    columns = max(PART_ELEMENTS[device.type] // len(scores), MIN_COLUMNS)
    peaks, tokens = [], []
    for begin in range(0, size, columns):
        scaled = scores[:, begin : begin + columns] / temperature
        ids = torch.arange(begin, begin + scaled.shape[1], device=device)
        sums = gumbel(random_bits(keys, ids)).add_(scaled)
        if threshold is not None:
            sums.masked_fill_(scaled < threshold, -torch.inf)
        peak, column = highest(sums)
        peaks.append(peak)
        tokens.append(column + begin)
    return torch.stack(peaks, dim=1), torch.stack(tokens, dim=1)


def highest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's maximum [N] and its column [N] int64, the lowest among equals; NaN counts as higher than all."""
    if not is_on_host(scores):
        peaks, columns = scores.max(dim=1)
        return peaks, columns
    best, at = highest_on_host(scores.numpy())
    return torch.from_numpy(best), torch.from_numpy(at)


def highest_on_host(scores: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Like `highest`. Takes less than a tenth of the time of torch's CPU operation, which is not vectorized."""
    at = scores.argmax(axis=1)
    return scores[np.arange(len(scores)), at], at


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's >> on int64 is arithmetic."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mix_int(x: int) -> int:
    x &= MASK
    x = ((x ^ (x >> 30)) * FACTORS[0]) & MASK
    x = ((x ^ (x >> 27)) * FACTORS[1]) & MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    x &= MASK
    return x - (1 << 64) if x >> 63 else x
