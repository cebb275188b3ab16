"""Kernels that are tried out one by one, each in a process of its own."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from bench.gpu.checks.store import TITLE
from engine_worker.attention.backend import HeadShape, Refusal, RefusedError
from engine_worker.attention.choice import KERNELS, Site, try_kernel
from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.paged import Kernel, triton_store
from engine_worker.attention.trial import WINDOW, verify_backend, verify_store
from engine_worker.runner.fusing import by_triton, verify_gumbel_max, verify_layers

PAGE = 16
"""Tokens per block on a CPU."""


class Place(NamedTuple):
    """What a kernel is tried for."""

    heads: HeadShape
    hidden_size: int
    windowed: bool
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        """For people."""
        heads, window = self.heads, "with a window" if self.windowed else "no window"
        return f"{heads.num_heads} heads over {heads.num_kv_heads} of {heads.head_dim}, {window}"


LAYERS = "fused layers and sampling"
FUSED = frozenset({TITLE, LAYERS})
"""Those that `fused_kernels` = false does without."""

Trial = Callable[[Place], None]
"""Raises RefusedError where the kernel is not here, not for this place or wrong, and whatever it raises."""


def subjects() -> Mapping[str, Trial]:
    """By title, in the order in which an engine depends on them."""
    attention = {kernel.title: _paged(kernel) for kernel in KERNELS}
    return {TITLE: _store, LAYERS: _fused, **attention, "cpu": _cpu}


def _paged(kernel: Kernel) -> Trial:
    def trial(place: Place) -> None:
        windows = (None, WINDOW) if place.windowed else (None,)
        site = Site.of(place.device, place.dtype, place.heads, windows, 0, fused=False)
        try_kernel(kernel, site)

    return trial


def _cpu(place: Place) -> None:
    if place.device.type != "cpu":
        raise RefusedError(Refusal.ABSENT, "it needs a CPU")
    windows = (None, WINDOW) if place.windowed else (None,)
    verify_backend(CpuAttention(place.heads, windows), place.heads, windows, PAGE, place.dtype, place.device)


def _store(place: Place) -> None:
    if place.device.type != "cuda":
        raise RefusedError(Refusal.ABSENT, "it needs a CUDA device")
    verify_store(triton_store(), place.heads, place.dtype, place.device)


def _fused(place: Place) -> None:
    if place.device.type != "cuda":
        raise RefusedError(Refusal.ABSENT, "it needs a CUDA device")
    kernels, gumbel_max = by_triton(place.device)
    verify_gumbel_max(gumbel_max, place.device)
    verify_layers(kernels, place.hidden_size, place.heads, place.dtype, place.device)
