"""Distributes the rows of `Slice.rows` to their consumers: log-probabilities of the prompt, and tensors for clients,
which are copied to the host."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine_worker.runner.forward import NO_LAYERS, Layers, rows_between
from engine_worker.runner.tensors import RowsFunction
from engine_worker.sampling.logprobs import PromptScores
from engine_worker.step import Kept, KeptRows, Slice
from sluice.wire.tensors import DType


class _Part(NamedTuple):
    """Consecutive rows of one tensor."""

    kept: int
    """Index among all `Kept` of the step."""
    name: str
    start: int
    """Position of the first row."""
    rows: Tensor
    """In host memory, once the copy is complete."""


class KeptTensors:
    """The rows of all `Kept` of a step's slices. On a GPU, only `collect` waits for the device."""

    def __init__(self, slices: Sequence[Slice], functions: Mapping[str, RowsFunction]) -> None:
        self._kept: list[Kept] = [kept for part in slices for kept in part.kept]
        self._functions = functions
        self._parts: list[_Part] = []
        self._copied: torch.cuda.Event | None = None

    def add(self, kept: int, done: int, hidden: Tensor, logits: Tensor, layers: Layers = NO_LAYERS) -> None:
        """Add the next rows for the `Kept` with index `kept`, after `done` earlier ones."""
        positions = self._kept[kept]
        for name in positions.names:
            rows = self._functions[name](hidden, logits, layers)
            if len(rows) != len(hidden):
                raise ValueError(f"the function of {name!r} returned {len(rows)} rows for {len(hidden)} positions")
            self._parts.append(_Part(kept, name, positions.start + done, _copy(rows)))

    def finish(self) -> None:
        """Called after the last row: record when all copies to the host are complete."""
        if any(part.rows.is_pinned() for part in self._parts):
            self._copied = torch.cuda.Event()
            self._copied.record()

    def collect(self) -> list[list[KeptRows]]:
        """See `Launched.kept_rows`."""
        if self._copied is not None:
            self._copied.synchronize()
        rows_of_kept: list[list[KeptRows]] = [[] for _ in self._kept]
        for kept, name, start, rows in self._parts:
            dtype = cast(DType, str(rows.dtype).removeprefix("torch."))
            # Viewed as bytes, since numpy has no bfloat16.
            data = rows.view(-1).view(torch.uint8).numpy().data
            rows_of_kept[kept].append(KeptRows(name, start, tuple(rows.shape), dtype, data))
        return rows_of_kept


def _copy(rows: Tensor) -> Tensor:
    """Start a copy to host memory that nothing else uses."""
    if rows.device.type == "cpu":
        return rows.clone(memory_format=torch.contiguous_format)
    pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    return pinned.copy_(rows, non_blocking=True)


class RequestedRows:
    """The requested rows of one step; only for steps that have any."""

    def __init__(self, slices: Sequence[Slice], device: torch.device, functions: Mapping[str, RowsFunction]) -> None:
        with_rows = [part for part in slices if part.scored is not None or part.kept]
        self._scores = PromptScores(with_rows, device)
        self._tensors = KeptTensors(with_rows, functions)
        self._runs: list[tuple[int | None, int]] = []
        """In the order of the rows: (index among all `Kept` of the step, or None for `Scored`; number of rows)."""
        num_kept = 0
        for part in with_rows:
            if part.scored is not None:
                self._runs.append((None, len(part.scored.tokens)))
            for kept in part.kept:
                self._runs.append((num_kept, kept.count))
                num_kept += 1
        self._run, self._done = 0, 0
        """The run that the next row belongs to, and the number of its rows that were added."""

    def add(self, hidden: Tensor, logits: Tensor, layers: Layers) -> None:
        """See `TakeRows`."""
        at = 0
        while at < len(hidden):
            kept, size = self._runs[self._run]
            end = min(len(hidden), at + size - self._done)
            if kept is None:
                self._scores.add(logits[at:end])
            else:
                self._tensors.add(kept, self._done, hidden[at:end], logits[at:end], rows_between(layers, at, end))
            self._done += end - at
            at = end
            if self._done == size:
                self._run, self._done = self._run + 1, 0

    def finish(self) -> None:
        """Called after the last row."""
        self._scores.finish()
        self._tensors.finish()

    def prompt_logprobs(self) -> list[bytes]:
        """See `Launched.prompt_logprobs`."""
        return self._scores.collect()

    def kept_rows(self) -> list[list[KeptRows]]:
        """See `Launched.kept_rows`."""
        return self._tensors.collect()
