"""An engine's memory for adapters on the device, and the copies from host memory to it, on every rank of a
tensor-parallel group."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.cache import zeros
from engine_worker.layers.adapters import StepAdapters, Target
from engine_worker.layers.shard import Cut, Shard
from engine_worker.lora.checkpoint import AdapterWeights, ModuleWeights
from engine_worker.lora.paged import NO_ADAPTER, Kernel, PagedAdapters
from engine_worker.step import AdapterLoad
from sluice.settings.engine import LoraOptions


class LoadPlan(NamedTuple):
    """What all ranks need to load an adapter; plain data."""

    load: AdapterLoad
    modules: tuple[tuple[int, int], ...]
    """For each module, the index of its target and its rank."""

    @classmethod
    def of(cls, load: AdapterLoad, weights: AdapterWeights) -> "LoadPlan":
        return cls(load, tuple((module.target.place, module.rank) for module in weights.modules))


class DeviceAdapters:
    def __init__(self, placed: PagedAdapters, targets: Sequence[Target], dtype: torch.dtype, shard: Shard) -> None:
        self.placed = placed
        self.targets = targets
        self.num_pages = len(placed.arena)
        self._dtype = dtype
        self._shard = shard
        self._failed: dict[int, str] = {}
        """Why loads failed, by number, until they succeed or are dropped."""

    def load(self, plans: Sequence[LoadPlan], weights: Sequence[AdapterWeights]) -> None:
        """`weights`: one per plan, only on rank 0. With several ranks, a load that fails raises, since other ranks may
        wait for its data; with one rank, `missing` reports it."""
        for plan in plans:
            for number in plan.load.dropped:
                self.placed.drop(number)
                self._failed.pop(number, None)
        for i, plan in enumerate(plans):
            self._load(plan, weights[i] if weights else None)

    def _load(self, plan: LoadPlan, weights: AdapterWeights | None) -> None:
        number = plan.load.number
        try:
            self.placed.place(number, self._modules(plan, weights), plan.load.pages)
        except Exception as error:
            if self._shard.size > 1:
                raise
            # Only the sequences that use this adapter end.
            self._failed[number] = f"{type(error).__name__}: {error}"
        else:
            self._failed.pop(number, None)

    def missing(self, numbers: NDArray[np.int64]) -> dict[int, str]:
        """The adapters of a step that are not on the device, with the reason."""
        absent = {number for number in numbers.tolist() if number != NO_ADAPTER and number not in self.placed}
        return {number: self._failed.get(number, "the step that loads it failed") for number in absent}

    def step(self, numbers: NDArray[np.int64], query_start: NDArray[np.int32]) -> StepAdapters | None:
        """See `PagedAdapters.step`. Skips missing adapters; None if no adapter remains."""
        missing = self.missing(numbers)
        if missing:
            numbers = np.where(np.isin(numbers, list(missing)), NO_ADAPTER, numbers)
        return self.placed.step(numbers, query_start) if numbers.any() else None

    def _modules(self, plan: LoadPlan, weights: AdapterWeights | None) -> Iterator[ModuleWeights]:
        """This rank's share of each module."""
        for i, (index, rank) in enumerate(plan.modules):
            target = self.targets[index]
            if weights is not None and self._shard.size == 1:
                yield _share(target, weights.modules[i].a, weights.modules[i].b)
                continue
            # Broadcast one module at a time, to save memory, and both matrices in one message.
            width, device = target.inputs.total + target.outputs.total, self.placed.arena.device
            both = torch.empty(rank, width, dtype=self._dtype, device=device)
            a, b = both[:, : target.inputs.total], both[:, target.inputs.total :]
            if weights is not None:
                a.copy_(weights.modules[i].a, non_blocking=True)
                b.copy_(weights.modules[i].b, non_blocking=True)
            self._shard.broadcast(both)
            yield _share(target, a, b)


def _share(target: Target, a: Tensor, b: Tensor) -> ModuleWeights:
    """Slice a whole module to this rank's share."""
    return ModuleWeights(target, a[Cut(1, target.inputs).slices], b[Cut(1, target.outputs).slices])


def make_adapters(
    targets: Sequence[Target], options: LoraOptions, dtype: torch.dtype, device: torch.device, shard: Shard, free: int
) -> DeviceAdapters:
    """`targets`: see `find_targets`. `free`: free bytes of device memory. Raises ValueError if not even one page
    fits, or if the model has no linear map that an adapter may change."""
    if not targets:
        raise ValueError("lora: no layer of this model can have adapters")
    widest = max(target.inputs.size + target.outputs.size for target in targets)
    ranks = options.lora_num_device_module_layer
    # The kernel for CPUs computes in float32.
    paged_dtype = torch.float32 if device.type == "cpu" else dtype
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
    return DeviceAdapters(placed, targets, dtype, shard)


def _kernel(device: torch.device) -> Kernel:
    # Imported only where needed: importing the first compiles it, and the second requires triton.
    if device.type == "cpu":
        from engine_worker.lora.cpu import CpuKernel

        return CpuKernel(torch.get_num_threads())
    from engine_worker.lora import kernels

    return kernels.bind
