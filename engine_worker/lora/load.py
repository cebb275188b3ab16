"""Allocates an engine's memory for adapters and chooses the kernel that computes with them."""

from collections.abc import Callable, Sequence

import torch

from engine_worker.attention.cache import zeros
from engine_worker.layers.adapters import Target
from engine_worker.layers.shard import Shard
from engine_worker.lora.device import DeviceAdapters
from engine_worker.lora.library import AdapterLibrary, LibraryPlan
from engine_worker.lora.paged import Kernel, PagedAdapters
from sluice.settings.engine import LoraOptions


def make_adapters(
    targets: Sequence[Target], options: LoraOptions, dtype: torch.dtype, device: torch.device, shard: Shard, free: int
) -> DeviceAdapters:
    """`targets`: see `find_targets`. `free`: free bytes of device memory. Raises ValueError if not even one page
    fits, or if the model has no linear map that an adapter may change."""
    if not targets:
        raise ValueError("lora: no layer of this model can have adapters")
    widest = max(target.inputs.size + target.outputs.size for target in targets)
    ranks = options.lora_num_device_module_layer
    paged_dtype = _paged_dtype(dtype, device)
    if ranks is None:
        ranks = int(free * options.lora_device_cache_percent) // (widest * paged_dtype.itemsize)
    num_pages = shard.all_min(ranks // options.lora_optimal_adapter_size)
    if num_pages < 1:
        raise ValueError(
            f"lora: the device's memory for adapters holds {ranks} ranks of one linear map, less than a page of "
            f"lora_optimal_adapter_size = {options.lora_optimal_adapter_size}"
        )
    page_ranks = options.lora_optimal_adapter_size
    arena = zeros((num_pages, page_ranks * widest), paged_dtype, device)
    placed = PagedAdapters(targets, arena, page_ranks, _kernel(device))
    return DeviceAdapters(placed, targets, dtype, device, shard, num_pages)


def make_library(
    adapters: DeviceAdapters | None,
    options: LoraOptions,
    dtype: torch.dtype,
    warn: Callable[[str, str], None],
) -> AdapterLibrary | None:
    """The library of a forward pass's adapters, with those of `lora_prefetch_dir`; None if it serves none. Raises
    ValueError on a folder that does not exist. `warn`: called with a log event and a reason."""
    if adapters is None:
        return None
    library = AdapterLibrary(options, _library_plan(adapters, options, dtype))
    for folder, reason in library.prefetch():
        warn("adapter_skipped", f"{folder}: {reason}")
    return library


def _library_plan(adapters: DeviceAdapters, options: LoraOptions, dtype: torch.dtype) -> LibraryPlan:
    host_bytes, ranks = options.lora_host_cache_size, options.lora_num_host_module_layer
    if ranks is not None:
        # Adapters in host memory are whole, not split over ranks.
        widest = max(target.inputs.total + target.outputs.total for target in adapters.targets)
        host_bytes = ranks * widest * dtype.itemsize
    return LibraryPlan(adapters.targets, dtype, adapters.num_pages, host_bytes)


def _paged_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The kernel for CPUs computes in float32."""
    return torch.float32 if device.type == "cpu" else dtype


def _kernel(device: torch.device) -> Kernel:
    # Imported only where needed: importing the first compiles it, and the second requires triton.
    if device.type == "cpu":
        from engine_worker.lora.cpu import CpuKernel

        return CpuKernel(torch.get_num_threads())
    from engine_worker.lora import kernels

    return kernels.bind
