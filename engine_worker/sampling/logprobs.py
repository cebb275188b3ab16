"""Logprobs of chosen tokens, and of a prompt's tokens, in the model's distribution, before any edit, temperature or
filter."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.sampling.host import is_on_host, on_host
from engine_worker.step import Slice
from sluice.wire.rows import TokenLogprob


class Logprobs(NamedTuple):
    """Logprobs of N chosen tokens, and of the K most likely tokens in each row."""

    chosen: Tensor
    """[N] float32: logprobs of the chosen tokens."""
    ranks: Tensor
    """[N] int64: 1 for the most likely token."""
    ids: Tensor
    """[N, K] int64."""
    best: Tensor
    """[N, K] float32: logprobs of `ids`, descending."""

    def entries(self, wanted: Sequence[int]) -> list[TokenLogprob]:
        """As plain data. wanted: the number of alternatives for each token."""
        columns = zip(*(column.tolist() for column in self), wanted, strict=True)
        return [TokenLogprob(chosen, rank, _best(ids, scores, count)) for chosen, rank, ids, scores, count in columns]


def compute_logprobs(logits: Tensor, tokens: Tensor, most: int) -> Logprobs:
    """logits: [N, vocab] float32. tokens: [N] int64. most: K. On a CPU, the lowest id comes first among equals."""
    if not is_on_host(logits):
        return torch_logprobs(logits, tokens, most)
    # Imported only where it is used, since the import compiles its kernel.
    from engine_worker.sampling.cpu_logprobs import cpu_logprobs

    return Logprobs(*cpu_logprobs(logits, tokens, most))


def torch_logprobs(logits: Tensor, tokens: Tensor, most: int) -> Logprobs:
    """See `compute_logprobs`."""
    logprobs, column = logits.log_softmax(dim=1), tokens.unsqueeze(1)
    ids = logits.topk(min(most, logits.shape[1]), dim=1).indices
    ranks = (logits > logits.gather(1, column)).sum(dim=1) + 1
    return Logprobs(logprobs.gather(1, column).squeeze(1), ranks, ids, logprobs.gather(1, ids))


def _best(ids: list[int], values: list[float], count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens; the lowest id first among equals."""
    return sorted(zip(ids, values, strict=True), key=lambda entry: (-entry[1], entry[0]))[:count]


class PromptScores:
    """The log-probabilities of all slices of a step that have `scored`, from logits that come a block of rows at
    a time. On a GPU, only `collect` waits for the device."""

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
        if self._scored and self._tokens.device.type != "cpu":
            self._blocks = [Logprobs(*map(on_host, block)) for block in self._blocks]
            self._copied = torch.cuda.Event()
            self._copied.record()

    def collect(self) -> list[bytes]:
        """See `Launched.prompt_logprobs`."""
        if not self._scored:
            return []
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
