"""The sampling operations that a kernel may compute on a GPU."""

from typing import NamedTuple

from engine_worker.sampling.filters import Thresholds
from engine_worker.sampling.noise import GumbelMax, torch_gumbel_max


class SamplingKernels(NamedTuple):
    gumbel_max: GumbelMax
    thresholds: Thresholds | None
    """None: filters examine only the most likely tokens, which may be too few; see `Filtered`."""


TORCH = SamplingKernels(torch_gumbel_max, None)
