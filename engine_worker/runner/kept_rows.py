"""Rows of tensors for clients, on their way to the host."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine_worker.runner.forward import NO_LAYERS, Layers
from engine_worker.runner.tensors import RowsFunction
from engine_worker.step import Kept, KeptRows, Slice
from sluice.ring.tensors import DType


class _Part(NamedTuple):
    kept: int
    """Index among the step's."""
    name: str
    start: int
    rows: Tensor


class KeptTensors:
    """Of all `kept` of a step's slices. On a device nothing waits before `collect`."""

    def __init__(self, slices: Sequence[Slice], functions: Mapping[str, RowsFunction]) -> None:
        self._kept: list[Kept] = [kept for part in slices for kept in part.kept]
        self._functions = functions
        self._parts: list[_Part] = []
        self._copied: torch.cuda.Event | None = None

    def add(self, kept: int, done: int, hidden: Tensor, logits: Tensor, layers: Layers = NO_LAYERS) -> None:
        """The next rows of number `kept`, of which `done` have come before."""
        wanted = self._kept[kept]
        for name in wanted.names:
            rows = self._functions[name](hidden, logits, layers)
            if len(rows) != len(hidden):
                raise ValueError(f"the tensor {name!r} has {len(rows)} rows for {len(hidden)} positions")
            self._parts.append(_Part(kept, name, wanted.start + done, _copy(rows)))

    def finish(self) -> None:
        """All rows have come: mark the end of their way to the host."""
        if any(part.rows.is_pinned() for part in self._parts):
            self._copied = torch.cuda.Event()
            self._copied.record()

    def collect(self) -> list[list[KeptRows]]:
        """See `Launched.kept_rows`."""
        if self._copied is not None:
            self._copied.synchronize()
        found: list[list[KeptRows]] = [[] for _ in self._kept]
        for kept, name, start, rows in self._parts:
            dtype = cast(DType, str(rows.dtype).removeprefix("torch."))
            # As bytes, since numpy has no bfloat16.
            data = rows.view(-1).view(torch.uint8).numpy().data
            found[kept].append(KeptRows(name, start, tuple(rows.shape), dtype, data))
        return found


def _copy(rows: Tensor) -> Tensor:
    """In host memory of its own."""
    if rows.device.type == "cpu":
        return rows.clone(memory_format=torch.contiguous_format)
    pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    return pinned.copy_(rows, non_blocking=True)
