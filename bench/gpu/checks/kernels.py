"""Attention backends that may be here, each kernel of them by itself."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from engine_worker.attention.backend import AttentionBackend, HeadShape
from engine_worker.attention.choice import KERNELS, Site, try_kernel
from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.paged import Kernel

Make = Callable[[HeadShape, int | None, int], AttentionBackend]
"""(heads, window, tokens per block) → a backend. Raises what it raises where it cannot be had."""


class Candidate(NamedTuple):
    """A backend, made where it is asked for."""

    title: str
    make: Make


def candidates(device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    """All but the reference."""
    paged = [_paged(kernel, device, dtype) for kernel in KERNELS]
    return (
        paged
        if device.type == "cuda"
        else [Candidate("cpu", lambda heads, window, _: CpuAttention(heads, (window,))), *paged]
    )


def _paged(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Candidate:
    @cache
    def tried(heads: HeadShape, windowed: bool, tokens_per_block: int) -> AttentionBackend:
        windows = (1,) if windowed else (None,)
        return try_kernel(kernel, Site.of(device, dtype, heads, windows, tokens_per_block)).backend

    return Candidate(kernel.title, lambda heads, window, size: tried(heads, window is not None, size))
