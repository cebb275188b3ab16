"""The sampling operations for which a GPU may have kernels."""

from typing import NamedTuple

from engine_worker.sampling.filters import Thresholds
from engine_worker.sampling.noise import GumbelMax, torch_gumbel_max


class SamplingKernels(NamedTuple):
    gumbel_max: GumbelMax
    thresholds: Thresholds | None
    """None: filters look at the most likely tokens only, which may be too few; see `Filtered`."""


TORCH = SamplingKernels(torch_gumbel_max, None)
