"""Log-probabilities of a prompt's tokens, from logits that are computed a block of rows at a time."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.sampling.host import on_host
from engine_worker.sampling.logprobs import Logprobs, compute_logprobs
from engine_worker.step import Slice


class PromptScores:
    """The log-probabilities of all slices of a step that have `scored`. On a GPU, only `collect` waits for the
    device."""

    def __init__(self, slices: Sequence[Slice], device: torch.device) -> None:
        self._scored = [part.scored for part in slices if part.scored is not None]
        # Through numpy, which converts a list several times as fast.
        tokens = torch.from_numpy(np.array([token for scored in self._scored for token in scored.tokens], np.int64))
        self._tokens = tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens
        self._most = max((scored.top for scored in self._scored), default=0)
        self._start = 0
        self._blocks: list[Logprobs] = []
        self._copied: torch.cuda.Event | None = None

    def add(self, logits: Tensor) -> None:
        """logits: [N, vocab] float32 of the next N rows."""
        tokens = self._tokens[self._start : self._start + len(logits)]
        self._blocks.append(compute_logprobs(logits, tokens, self._most))
        self._start += len(logits)

    def finish(self) -> None:
        """Called after the last row: start the copies to the host."""
        if self._tokens.device.type != "cpu":
            self._blocks = [Logprobs(*map(on_host, block)) for block in self._blocks]
            self._copied = torch.cuda.Event()
            self._copied.record()

    def collect(self) -> list[bytes]:
        """See `Launched.prompt_logprobs`."""
        if self._copied is not None:
            self._copied.synchronize()
        words = np.concatenate([_packed(block) for block in self._blocks])
        entries, start = [], 0
        for scored in self._scored:
            end = start + len(scored.tokens)
            entries.append(_cut(words[start:end], self._most, scored.top).tobytes())
            start = end
        return entries


def _packed(block: Logprobs) -> NDArray[np.uint32]:
    """[N, 2 + 2K]: rows in the format of `sluice.wire.prompt_logprobs`."""
    chosen, ranks, ids, best = (tensor.numpy() for tensor in block)
    if (best[:, 1:] == best[:, :-1]).any():
        # The lowest id first among equals, as for generated tokens.
        order = np.lexsort((ids, -best), axis=1)
        ids, best = np.take_along_axis(ids, order, 1), np.take_along_axis(best, order, 1)
    columns = (chosen[:, None].view(np.uint32), ranks[:, None], ids, np.ascontiguousarray(best).view(np.uint32))
    return np.concatenate([column.astype("<u4", copy=False) for column in columns], axis=1)


def _cut(words: NDArray[np.uint32], most: int, top: int) -> NDArray[np.uint32]:
    """The rows with only the first `top` of their `most` alternatives."""
    if top == most:
        return words
    kept = [0, 1, *range(2, 2 + top), *range(2 + most, 2 + most + top)]
    cut: NDArray[np.uint32] = words[:, kept]
    return cut
