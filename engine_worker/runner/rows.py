"""Distributes the rows of `Slice.rows` to their consumers: log-probabilities of the prompt, and tensors for clients."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine_worker.runner.forward import Layers, rows_between
from engine_worker.runner.kept_rows import KeptTensors
from engine_worker.runner.tensors import RowsFunction
from engine_worker.sampling.prompt_logprobs import PromptScores
from engine_worker.step import KeptRows, Slice


class WantedRows:
    """The rows of one step that has any."""

    def __init__(self, slices: Sequence[Slice], device: torch.device, functions: Mapping[str, RowsFunction]) -> None:
        with_rows = [part for part in slices if part.scored is not None or part.kept]
        self._scores = PromptScores(with_rows, device) if any(part.scored for part in with_rows) else None
        self._tensors = KeptTensors(with_rows, functions) if any(part.kept for part in with_rows) else None
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
            if kept is None and self._scores is not None:
                self._scores.add(logits[at:end])
            elif kept is not None and self._tensors is not None:
                self._tensors.add(kept, self._done, hidden[at:end], logits[at:end], rows_between(layers, at, end))
            self._done += end - at
            at = end
            if self._done == size:
                self._run, self._done = self._run + 1, 0

    def finish(self) -> None:
        """Called after the last row."""
        if self._scores is not None:
            self._scores.finish()
        if self._tensors is not None:
            self._tensors.finish()

    def prompt_logprobs(self) -> list[bytes]:
        """See `Launched.prompt_logprobs`."""
        return [] if self._scores is None else self._scores.collect()

    def kept_rows(self) -> list[list[KeptRows]]:
        """See `Launched.kept_rows`."""
        return [] if self._tensors is None else self._tensors.collect()
