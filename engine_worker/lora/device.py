"""Copies adapters from host memory to the device, on every rank of a tensor-parallel group."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.layers.adapters import StepAdapters, Target
from engine_worker.layers.shard import Shard
from engine_worker.lora.checkpoint import AdapterWeights
from engine_worker.lora.paged import PagedAdapters
from engine_worker.lora.placed import NO_ADAPTER, PlacedModule, share
from engine_worker.step import AdapterLoad


class LoadPlan(NamedTuple):
    """What all ranks need to load an adapter; plain data."""

    load: AdapterLoad
    modules: tuple[tuple[int, int], ...]
    """For each module, the index of its target and its rank."""

    @classmethod
    def of(cls, load: AdapterLoad, weights: AdapterWeights) -> "LoadPlan":
        return cls(load, tuple((module.target.place, module.rank) for module in weights.modules))


class DeviceAdapters:
    def __init__(
        self,
        placed: PagedAdapters,
        targets: Sequence[Target],
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
        num_pages: int,
    ) -> None:
        self.placed = placed
        self.targets = targets
        self.num_pages = num_pages
        self._dtype = dtype
        self._device = device
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

    def _modules(self, plan: LoadPlan, weights: AdapterWeights | None) -> Iterator[PlacedModule]:
        for i, (index, rank) in enumerate(plan.modules):
            target = self.targets[index]
            if weights is not None and self._shard.size == 1:
                yield share(target, weights.modules[i].a, weights.modules[i].b)
                continue
            # Broadcast one module at a time, to save memory, and both matrices in one message.
            both = torch.empty(rank, target.inputs.total + target.outputs.total, dtype=self._dtype, device=self._device)
            a, b = both[:, : target.inputs.total], both[:, target.inputs.total :]
            if weights is not None:
                _fill(a, weights.modules[i].a)
                _fill(b, weights.modules[i].b)
            self._shard.broadcast(both)
            yield share(target, a, b)


def _fill(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)
