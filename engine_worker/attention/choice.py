"""Chooses the attention backend for a machine and a model, and says why."""

from dataclasses import dataclass, replace

import torch

from engine_worker.attention import flash
from engine_worker.attention.backend import AttentionBackend, Refusal, RefusedError, Site, check_device
from engine_worker.attention.cache import store_by_torch
from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.paged import TRITON, Kernel, PagedAttention, Store, triton_store
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.attention.trial import verify_backend, verify_captured, verify_store

KERNELS: tuple[Kernel, ...] = (*flash.KERNELS, TRITON)
"""Best first."""
# Small blocks waste little memory at a sequence's end, and share prefixes at a fine grain.
TOKENS_PER_BLOCK = 16


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """A backend that has passed its test on this machine."""

    backend: AttentionBackend
    reason: str
    """Why it was chosen and better ones were not; for the log."""
    tokens_per_block: int


def choose(wanted: str, site: Site) -> ChosenBackend:
    """`wanted` is the setting `attention`. auto: on a CPU its backend; on a GPU the first of `KERNELS` that passes its
    test, those that split keys before the others, or else the reference.

    Raises ValueError, with the reason, if a backend wanted by name cannot run, and for half precision on a CPU.
    """
    size = site.tokens_per_block or TOKENS_PER_BLOCK
    if wanted == "reference":
        return ChosenBackend(ReferenceAttention(site.heads), "selected by the setting", size)
    if wanted == "cpu" and site.capability is not None:
        raise ValueError("attention = cpu does not run on device cuda")
    if wanted == "cpu" or (wanted == "auto" and site.capability is None):
        if site.dtype != torch.float32:
            name = str(site.dtype).removeprefix("torch.")
            raise ValueError(
                f"dtype = {name} is slower than float32 on a CPU, where attention is vectorised in float32 only: "
                "use dtype = float32, or auto"
            )
        return ChosenBackend(CpuAttention(site.heads, site.windows), "the device is a CPU", size)
    refused: list[str] = []
    # A stable sort: among kernels that split long contexts the best still comes first.
    for kernel in sorted(KERNELS, key=lambda kernel: not kernel.splits(site.heads, site.windows)):
        if wanted in ("auto", kernel.name):
            try:
                found = try_kernel(kernel, site)
            except RefusedError as error:
                refused.append(f"{kernel.title} {error}")
            else:
                return replace(found, reason=". ".join([found.reason, *refused]))
    if wanted != "auto":
        raise ValueError(f"attention = {wanted} cannot run here. {'. '.join(refused)}")
    return ChosenBackend(ReferenceAttention(site.heads), f"nothing faster runs here. {'. '.join(refused)}", size)


def try_kernel(kernel: Kernel, site: Site) -> ChosenBackend:
    """Load and test a kernel. Raises RefusedError if it does not support this site, cannot be loaded, fails or is
    wrong, and BrokenDeviceError if it breaks the CUDA context."""
    size = _block_size(kernel, site)
    store, notes = _choose_store(site)
    try:
        backend = PagedAttention(kernel, site.heads, store)
        verify_backend(backend, site, size)
        notes += _verify_captured(backend, kernel, site, size)
    except RefusedError:
        raise
    except Exception as error:  # a third-party package may raise anything
        refused = RefusedError.of(error)
        # A kernel that is absent has run nothing, so the device need not be checked.
        if refused.kind is not Refusal.ABSENT:
            check_device(site.device, kernel.title, f"attention = {_alternative(kernel)}", error)
        raise refused from error
    return ChosenBackend(backend, ". ".join([f"{kernel.title} runs here", *notes]), size)


def _verify_captured(backend: PagedAttention, kernel: Kernel, site: Site, size: int) -> list[str]:
    """Notes: a kernel that is right in all other steps serves without graphs of those with context."""
    if not backend.context_graphs:
        return []
    try:
        verify_captured(backend, site, size)
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        refused = error if isinstance(error, RefusedError) else RefusedError.of(error)
        check_device(site.device, kernel.title, f"attention = {_alternative(kernel)}", error)
        backend.context_graphs = False
        return [f"No graphs of steps with context: in them it {refused}"]
    return []


def _choose_store(site: Site) -> tuple[Store, list[str]]:
    """Triton's, or torch's and the reason."""
    if not site.fused:
        return store_by_torch, ["Triton's store is not used: fused_kernels = false"]
    try:
        store = triton_store()
        verify_store(store, site)
    except RefusedError as error:
        return store_by_torch, [f"Triton's store {error}"]
    except Exception as error:  # noqa: BLE001 - without a C compiler Triton may raise anything
        refused = RefusedError.of(error)
        if refused.kind is not Refusal.ABSENT:
            check_device(site.device, "Triton's store", "fused_kernels = false", error)
        return store_by_torch, [f"Triton's store {refused}"]
    return store, []


def _alternative(kernel: Kernel) -> str:
    """What to select by name instead of this one."""
    return "reference" if kernel.name == TRITON.name else TRITON.name


def _block_size(kernel: Kernel, site: Site) -> int:
    """Tokens per block with this kernel. Raises RefusedError if the kernel does not support this site."""
    multiple = kernel.tokens_per_block
    size = site.tokens_per_block or max(multiple, TOKENS_PER_BLOCK)
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
