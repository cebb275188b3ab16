"""Attention backends that may be here, each kernel of them by itself."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from bench.gpu.findings import Skip
from engine_worker.attention import flash, varlen
from engine_worker.attention.backend import AttentionBackend, HeadShape, Refusal, RefusedError
from engine_worker.attention.choice import KERNELS, Site, try_kernel
from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.paged import Kernel

Make = Callable[[HeadShape, int | None, int], AttentionBackend]
"""(heads, window, tokens per block) → a backend. Raises Skip where it is not here or not for these, and RefusedError
where it is and fails."""
COMPILED = {kernel.title for kernel in (*flash.KERNELS, varlen.KERNEL)} - {"FlashAttention-4"}
"""Before they come to this machine; the others are compiled where they are first used."""


class Candidate(NamedTuple):
    """A backend, made where it is asked for."""

    title: str
    make: Make

    @property
    def compiles(self) -> bool:
        """Whether that takes time when it is first used."""
        return self.title not in COMPILED


def candidates(device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    """All but the reference."""
    found = [paged(kernel, device, dtype) for kernel in KERNELS]
    if device.type == "cpu":
        found.insert(0, Candidate("cpu", lambda heads, window, _: CpuAttention(heads, (window,))))
    return found


def paged(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Candidate:
    """One kernel."""

    @cache
    def tried(heads: HeadShape, windowed: bool, tokens_per_block: int) -> AttentionBackend:
        windows = (1,) if windowed else (None,)
        try:
            return try_kernel(kernel, Site.of(device, dtype, heads, windows, tokens_per_block)).backend
        except RefusedError as error:
            if error.kind is Refusal.ABSENT:
                raise Skip(error.reason) from error
            raise

    return Candidate(kernel.title, lambda heads, window, size: tried(heads, window is not None, size))
