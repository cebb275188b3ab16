"""Logprobs of the chosen tokens in the model's distribution, before any edit, temperature or filter."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine_worker.sampling.host import is_on_host
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
