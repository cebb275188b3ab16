"""Attention backends that may be installed, kernel by kernel, and Triton's store of keys and values."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch

from bench.gpu.findings import Check, Skip
from engine_worker.attention import flash
from engine_worker.attention.backend import AttentionBackend, HeadShape, Refusal, RefusedError, Site, capability_of
from engine_worker.attention.choice import KERNELS, try_kernel
from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.paged import Kernel, Store, triton_store
from engine_worker.attention.trial import verify_store

Make = Callable[[HeadShape, int | None, int], AttentionBackend]
"""(heads, window, tokens per block) → a backend. Raises Skip if it is not installed or not meant for these, and
RefusedError if it fails."""
STORE = "Triton's store"
STORE_CHECK = f"{STORE} = torch's"
COMPILED = {kernel.title for kernel in flash.KERNELS} - {"FlashAttention-4"}
"""Ahead of time; the others compile on first use."""


class Candidate(NamedTuple):
    title: str
    make: Make

    @property
    def compiles(self) -> bool:
        return self.title not in COMPILED


def candidates(device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    found = [paged(kernel, device, dtype) for kernel in KERNELS]
    if device.type == "cpu":
        found.insert(0, Candidate("cpu", lambda heads, window, _: CpuAttention(heads, (window,))))
    return found


def paged(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Candidate:

    @cache
    def tried(heads: HeadShape, windowed: bool, tokens_per_block: int) -> AttentionBackend:
        windows = (1,) if windowed else (None,)
        try:
            return try_kernel(
                kernel, Site(device, capability_of(device), dtype, heads, windows, tokens_per_block)
            ).backend
        except RefusedError as error:
            if error.kind is Refusal.ABSENT:
                raise Skip(error.reason) from error
            raise

    return Candidate(kernel.title, lambda heads, window, size: tried(heads, window is not None, size))


def check_store(heads: Sequence[HeadShape], dtype: torch.dtype, device: torch.device) -> Check:
    """Raises Skip without Triton or a GPU, and what `compare_stores` raises."""
    if device.type == "cpu":
        raise Skip("it needs a CUDA device")
    try:
        store = triton_store()
    except ModuleNotFoundError as error:
        raise Skip(str(error)) from error
    return compare_stores(store, heads, dtype, device)


def compare_stores(store: Store, heads: Sequence[HeadShape], dtype: torch.dtype, device: torch.device) -> Check:
    for one in heads:
        verify_store(store, Site(device, capability_of(device), dtype, one, (None,), 0))
    return Check(STORE_CHECK, passed=True, detail=f"{len(heads)} shapes of heads")
