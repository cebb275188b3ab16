"""The memory for adapters of an engine, and what computes with them."""

from collections.abc import Sequence

import torch

from engine_worker.layers.adapters import Target, find_targets
from engine_worker.layers.layer import Layer
from engine_worker.layers.shard import Shard
from engine_worker.lora.cpu import CpuAdapters
from engine_worker.lora.device import DeviceAdapters
from engine_worker.lora.library import LibraryPlan
from engine_worker.lora.placed import PlacedAdapters
from sluice.settings.engine import LoraOptions


def make_adapters(
    layers: Sequence[Layer], options: LoraOptions, dtype: torch.dtype, device: torch.device, shard: Shard, free: int
) -> DeviceAdapters:
    """`layers`: of the decoder. `free`: bytes of device memory. Raises ValueError if not one page fits, or the model
    has no linear map that an adapter may change."""
    targets = find_targets(layers)
    if not targets:
        raise ValueError("lora: no layer of this model can have adapters")
    widest = max(target.inputs.size + target.outputs.size for target in targets)
    ranks = options.lora_num_device_module_layer
    if ranks is None:
        ranks = int(free * options.lora_device_cache_percent) // (widest * dtype.itemsize)
    num_pages = shard.all_min(ranks // options.lora_optimal_adapter_size)
    if num_pages < 1:
        raise ValueError(
            f"lora: the device's memory for adapters holds {ranks} ranks of one linear map, less than a page of "
            f"lora_optimal_adapter_size = {options.lora_optimal_adapter_size}"
        )
    placed = _placed(targets, options, dtype, device, num_pages, widest)
    return DeviceAdapters(placed, targets, dtype, device, shard, num_pages)


def library_plan(adapters: DeviceAdapters, options: LoraOptions, dtype: torch.dtype) -> LibraryPlan:
    host_bytes, ranks = options.lora_host_cache_size, options.lora_num_host_module_layer
    if ranks is not None:
        # Host memory has whole adapters, whatever the number of ranks.
        widest = max(target.inputs.total + target.outputs.total for target in adapters.targets)
        host_bytes = ranks * widest * dtype.itemsize
    return LibraryPlan(adapters.targets, dtype, adapters.num_pages, host_bytes)


def _placed(
    targets: Sequence[Target],
    options: LoraOptions,
    dtype: torch.dtype,
    device: torch.device,
    num_pages: int,
    widest: int,
) -> PlacedAdapters:
    if device.type == "cpu":
        return CpuAdapters(_widths(targets))
    # Imported only on a GPU: it needs triton.
    from engine_worker.lora.paged import PagedAdapters

    return PagedAdapters(targets, num_pages, options.lora_optimal_adapter_size, widest, dtype, device)


def _widths(targets: Sequence[Target]) -> dict[tuple[int, str], int]:
    """Outputs of each linear layer."""
    found: dict[tuple[int, str], int] = {}
    for target in targets:
        key = (target.layer, target.linear)
        found[key] = max(found.get(key, 0), target.first + target.outputs.size)
    return found
