"""Chooses the attention backend for a machine and a model, and reports the reason."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from engine_worker.attention import flash
from engine_worker.attention.backend import AttentionBackend, Refusal, RefusedError, Site, check_device
from engine_worker.attention.cache import store_by_torch
from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.paged import TRITON, Kernel, PagedAttention, Store, triton_store
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.attention.trial import verify_backend, verify_captured, verify_store
from sluice.settings.engine import SMALLEST_BLOCK

KERNELS: tuple[Kernel, ...] = (*flash.KERNELS, TRITON)
"""In order of preference."""


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """A backend that has passed its test on this machine."""

    backend: AttentionBackend
    reason: str
    """Why it was chosen and preferred kernels were not; for the log."""
    tokens_per_block: int


def choose(setting: str, site: Site) -> ChosenBackend:
    """`setting` is the value of the setting `attention`. With auto, the choice on a CPU is the backend for CPUs; on a
    GPU it is the first of `KERNELS` that passes its test, where kernels that split keys come first, or the reference if
    no kernel passes.

    Raises ValueError, with the reason, if the backend named by the setting cannot run, and for half precision on a CPU.
    """
    size = site.tokens_per_block or SMALLEST_BLOCK
    if setting == "reference":
        return ChosenBackend(ReferenceAttention(site.heads), "selected by the setting", size)
    if setting == "cpu" and site.capability is not None:
        raise ValueError("attention = cpu does not run on device cuda")
    if setting == "cpu" or (setting == "auto" and site.capability is None):
        check_dtype(setting, site.device.type, site.dtype)
        return ChosenBackend(CpuAttention(site.heads, site.windows), "the device is a CPU", size)
    refused: list[str] = []
    # The sort is stable: kernels that split long contexts keep their order of preference.
    for kernel in sorted(KERNELS, key=lambda kernel: not kernel.splits(site.heads, site.windows)):
        if setting in ("auto", kernel.name):
            try:
                chosen = try_kernel(kernel, site)
            except RefusedError as error:
                refused.append(f"{kernel.title} {error}")
            else:
                return replace(chosen, reason=". ".join([chosen.reason, *refused]))
    if setting != "auto":
        raise ValueError(f"attention = {setting} cannot run here. {'. '.join(refused)}")
    return ChosenBackend(ReferenceAttention(site.heads), f"nothing faster runs here. {'. '.join(refused)}", size)


def check_dtype(setting: str, device: str, dtype: torch.dtype) -> None:
    """Raises ValueError for half precision on a CPU, unless the reference computes it."""
    if device == "cpu" and setting in ("auto", "cpu") and dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"dtype = {name} is slower than float32 on a CPU, where attention is vectorised in float32 only: "
            "use dtype = float32, or auto"
        )


def try_kernel(kernel: Kernel, site: Site) -> ChosenBackend:
    """Load and test a kernel. Raises RefusedError if it does not support this site, cannot be loaded, fails or computes
    wrong results, and BrokenDeviceError if it breaks the CUDA context."""
    size = _block_size(kernel, site)
    store, notes = _choose_store(site)
    with _refusing(site, kernel.title, f"attention = {_alternative(kernel)}"):
        backend = PagedAttention(kernel, site.heads, store)
        verify_backend(backend, site, size)
        notes += _verify_captured(backend, kernel, site, size)
    return ChosenBackend(backend, ". ".join([f"{kernel.title} runs here", *notes]), size)


def _verify_captured(backend: PagedAttention, kernel: Kernel, site: Site, size: int) -> list[str]:
    """Test the kernel as a CUDA graph of steps with context runs it. If that fails, disable these graphs and return a
    note for the log; the kernel is still used."""
    if not backend.context_graphs:
        return []
    try:
        with _refusing(site, kernel.title, f"attention = {_alternative(kernel)}"):
            verify_captured(backend, site, size)
    except RefusedError as refused:
        backend.context_graphs = False
        return [f"No CUDA graphs of steps with context: in their test the kernel {refused}"]
    return []


def _choose_store(site: Site) -> tuple[Store, list[str]]:
    """The Triton kernel, or torch's operations and the reason for them."""
    if not site.fused:
        return store_by_torch, ["Triton's store is not used: fused_kernels = false"]
    try:
        with _refusing(site, "Triton's store", "fused_kernels = false"):
            store = triton_store()
            verify_store(store, site)
    except RefusedError as refused:
        return store_by_torch, [f"Triton's store {refused}"]
    return store, []


@contextmanager
def _refusing(site: Site, kernel: str, setting: str) -> Iterator[None]:
    """Convert errors of a kernel that is being loaded and tested to RefusedError. Raises BrokenDeviceError, which names
    the kernel and the setting that avoids it, if the kernel broke the CUDA context."""
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:  # a third-party package may raise anything, and so may Triton without a C compiler
        refused = RefusedError.of(error)
        # A kernel that is not available has not run, so the device need not be checked.
        if refused.kind is not Refusal.ABSENT:
            check_device(site.device, kernel, setting, error)
        raise refused from error


def _alternative(kernel: Kernel) -> str:
    """The value of the setting `attention` to use instead of this kernel."""
    return "reference" if kernel.name == TRITON.name else TRITON.name


def _block_size(kernel: Kernel, site: Site) -> int:
    """Tokens per block with this kernel. Raises RefusedError if the kernel does not support this site."""
    multiple = kernel.tokens_per_block
    size = site.tokens_per_block or max(multiple, SMALLEST_BLOCK)
    if site.capability is None:
        reason = "it needs a CUDA device"
    elif site.capability[0] not in kernel.majors:
        reason = f"it does not support compute capability {site.capability[0]}.{site.capability[1]}"
    elif site.dtype not in kernel.dtypes:
        reason = f"it does not support {str(site.dtype).removeprefix('torch.')}"
    elif site.heads.head_dim not in kernel.head_dims:
        reason = f"it does not support heads of dimension {site.heads.head_dim}"
    elif size % multiple:
        reason = f"tokens_per_block = {size} is not a multiple of {multiple}"
    else:
        return size
    raise RefusedError(Refusal.ABSENT, reason)
