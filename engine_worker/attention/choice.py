"""Which attention backend a machine gets, and why."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine_worker.attention import flash, tiled, varlen
from engine_worker.attention.backend import AttentionBackend, HeadShape
from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.paged import Kernel, PagedAttention
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.attention.refusal import Refusal, RefusedError, check_device
from engine_worker.attention.store import Store, fused, plain
from engine_worker.attention.trial import try_out, try_store

KERNELS: tuple[Kernel, ...] = (*flash.KERNELS, varlen.KERNEL, tiled.KERNEL)
"""Best first."""
TOKENS_PER_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Site:
    """Where attention is to run, and what it is given."""

    device: torch.device
    capability: tuple[int, int] | None
    """Compute capability of a CUDA device; None: it is a CPU."""
    dtype: torch.dtype
    heads: HeadShape
    windows: tuple[int | None, ...]
    """Of the model's layers."""
    tokens_per_block: int
    """0: whatever suits the backend."""
    fused: bool = True
    """Whether Triton may write into the KV cache."""

    @classmethod
    def of(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        heads: HeadShape,
        windows: Sequence[int | None],
        tokens_per_block: int,
        fused: bool = True,
    ) -> "Site":
        """With the capability of the device."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        return cls(device, capability, dtype, heads, tuple(windows), tokens_per_block, fused)


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend that was tried on this machine."""

    backend: AttentionBackend
    because: str
    """For the log."""
    tokens_per_block: int


def choose(wanted: str, site: Site) -> Choice:
    """auto: on a GPU the first of `KERNELS` that can run, those that split keys before the others, or the reference; on
    a CPU the CPU's. Raises ValueError where the one that is wanted by name cannot run, with the reason, and where a
    CPU's gets half precision."""
    size = site.tokens_per_block or TOKENS_PER_BLOCK
    if wanted == "reference":
        return Choice(ReferenceAttention(site.heads), "it was asked for", size)
    if wanted == "cpu" and site.capability is not None:
        raise ValueError("attention = cpu does not run on device cuda")
    if wanted == "cpu" or (wanted == "auto" and site.capability is None):
        if site.dtype != torch.float32:
            name = str(site.dtype).removeprefix("torch.")
            raise ValueError(
                f"dtype = {name} is slower than float32 on a CPU, where attention is vectorised in float32 only: "
                "use dtype = float32, or auto"
            )
        return Choice(CpuAttention(site.heads, site.windows), "the device is a CPU", size)
    refused: list[str] = []
    for kernel in sorted(KERNELS, key=lambda kernel: not kernel.splits(site.heads, site.windows)):
        if wanted in ("auto", kernel.name):
            try:
                found = try_kernel(kernel, site)
            except RefusedError as error:
                refused.append(f"{kernel.title} {error}")
            else:
                return replace(found, because=". ".join([found.because, *refused]))
    if wanted != "auto":
        raise ValueError(f"attention = {wanted} cannot run here. {'. '.join(refused)}")
    return Choice(ReferenceAttention(site.heads), f"nothing faster runs here. {'. '.join(refused)}", size)


def try_kernel(kernel: Kernel, site: Site) -> Choice:
    """Raises RefusedError where it is not for this site, cannot be loaded, fails or is wrong there, and
    BrokenDeviceError where it takes the CUDA context with it."""
    size = _suited(kernel, site)
    store, because = _store(site)
    try:
        backend = PagedAttention(kernel, site.heads, store)
        try_out(backend, site.heads, site.windows, size, site.dtype, site.device)
    except RefusedError:
        raise
    except Exception as error:  # whatever a foreign package raises is why it is not used
        refused = RefusedError.of(error)
        if refused.kind is not Refusal.ABSENT:
            check_device(site.device, kernel.title, f"attention = {_other(kernel)}", error)
        raise refused from error
    return Choice(backend, ". ".join([f"{kernel.title} runs here", *because]), size)


def _store(site: Site) -> tuple[Store, list[str]]:
    """The fused one, or the plain one and why."""
    if not site.fused:
        return plain, ["Triton's store is not used: fused_kernels = false"]
    try:
        store = fused()
        try_store(store, site.heads, site.dtype, site.device)
    except RefusedError as error:
        return plain, [f"Triton's store {error}"]
    except Exception as error:  # noqa: BLE001 - without a C compiler Triton raises what it likes
        refused = RefusedError.of(error)
        if refused.kind is not Refusal.ABSENT:
            check_device(site.device, "Triton's store", "fused_kernels = false", error)
        return plain, [f"Triton's store {refused}"]
    return store, []


def _other(kernel: Kernel) -> str:
    """What to ask for by name in place of this one."""
    return "reference" if kernel.name == tiled.KERNEL.name else tiled.KERNEL.name


def _suited(kernel: Kernel, site: Site) -> int:
    """Tokens per block for this kernel. Raises RefusedError where it is not for this site."""
    multiple = kernel.tokens_per_block
    size = site.tokens_per_block or max(multiple, TOKENS_PER_BLOCK)
    if site.capability is None:
        reason = "it needs a CUDA device"
    elif site.capability[0] not in kernel.majors:
        reason = f"it is not for compute capability {site.capability[0]}.{site.capability[1]}"
    elif site.dtype not in kernel.dtypes:
        reason = f"it does not compute in {str(site.dtype).removeprefix('torch.')}"
    elif site.heads.head_dim not in kernel.head_dims:
        reason = f"it does not have heads of dimension {site.heads.head_dim}"
    elif size % multiple:
        reason = f"tokens_per_block = {size} is no multiple of {multiple}"
    else:
        return size
    raise RefusedError(Refusal.ABSENT, reason)
