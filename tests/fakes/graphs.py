"""CUDA graphs on a CPU: a replay repeats the captured operations, one by one, on the same tensors."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from engine_worker.runner.graphs import CaptureError

SYNCS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::lift_fresh",
    "aten::masked_select",
    "aten::nonzero",
}
"""Operations that synchronize the host with the device, which CUDA refuses during a capture."""


class Recording(TorchDispatchMode):
    """Records every operation with its arguments and result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        indexed_by_mask = name in ("aten::index", "aten::index_put_") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if name in SYNCS or indexed_by_mask:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class FakeGraph:
    """Replays on the tensors of the capture.

    Fills intermediate tensors with NaN after each replay: their memory belongs to the pool that all graphs share.
    """

    def __init__(self, calls: list[tuple[Callable[..., Any], Any, Any, Any]]) -> None:
        self.replays = 0
        self._calls = calls
        inputs: set[int] = set()
        self._allocated: list[Tensor] = []
        """Tensors allocated during the capture, from the graphs' memory pool."""
        for _, args, kwargs, result in calls:
            for tensor in _tensors(result):
                if _memory(tensor) not in inputs | {_memory(x) for x in _tensors((args, kwargs))}:
                    self._allocated.append(tensor)
            inputs |= {_memory(tensor) for tensor in _tensors((args, kwargs, result))}
        self._poison()

    def replay(self) -> None:
        """Run every operation again and copy its result into the tensor of the capture."""
        self.replays += 1
        for func, args, kwargs, result in self._calls:
            new_result = func(*args, **kwargs)
            for work in _collectives(new_result):
                work.wait()
            for old, new in zip(_tensors(result), _tensors(new_result), strict=True):
                if _memory(old) != _memory(new):
                    old.copy_(new)
        self._poison()

    def _poison(self) -> None:
        for tensor in self._allocated:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)


class FakeCapture:
    """Captures graphs and stores them in order."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def __call__(self, work: Callable[[], None]) -> FakeGraph:
        work()
        with Recording() as recording:
            try:
                work()
            except RuntimeError as error:
                raise CaptureError(str(error)) from error
        self.graphs.append(FakeGraph(recording.calls))
        return self.graphs[-1]


class WeakCapture:
    """Captures graphs. `alive`: those that are still referenced elsewhere."""

    def __init__(self) -> None:
        self.alive: WeakSet[FakeGraph] = WeakSet()

    def __call__(self, work: Callable[[], None]) -> FakeGraph:
        graph = FakeCapture()(work)
        self.alive.add(graph)
        return graph


def _collectives(tree: Any) -> list[Any]:
    """Collective operations in flight."""
    return [Work.unbox(leaf) for leaf in tree_iter(tree) if isinstance(leaf, torch.ScriptObject)]


def _tensors(tree: Any) -> list[Tensor]:
    """All tensors except packed weights, which have no storage."""
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
