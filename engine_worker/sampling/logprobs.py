"""Logprobs of the chosen tokens under the model's own distribution, before any edit, temperature or filter."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.sampling.largest import largest
from sluice.ring.rows import TokenLogprob


class Logprobs(NamedTuple):
    """Of N chosen tokens, and of the K most likely tokens in each row."""

    own: Tensor
    """[N] float32."""
    ranks: Tensor
    """[N] int64: 1 for the most likely token."""
    ids: Tensor
    """[N, K] int64."""
    best: Tensor
    """[N, K] float32: logprobs of `ids`, descending."""

    def entries(self, wanted: Sequence[int]) -> list[TokenLogprob]:
        """As plain data. wanted: number of alternatives per token."""
        columns = zip(*(column.tolist() for column in self), wanted, strict=True)
        return [TokenLogprob(own, rank, _best(ids, scores, count)) for own, rank, ids, scores, count in columns]


def compute_logprobs(logits: Tensor, tokens: Tensor, most: int) -> Logprobs:
    """Logits [N, vocab], tokens [N]; most: K."""
    # One pass on a CPU, where logsumexp takes twice as long.
    logprobs = logits.log_softmax(dim=1)
    column = tokens.unsqueeze(1)
    own = logprobs.gather(1, column).squeeze(1)
    # Without columns topk would still wake the other threads of a CPU.
    ids = largest(logits, min(most, logits.shape[1])) if most else tokens.new_empty(len(tokens), 0)
    best = logprobs.gather(1, ids)
    # In the memory of the logprobs. As float32, which counts exactly up to 2^24: a sum of bools takes five times as
    # long on a CPU.
    ranks = torch.gt(logits, logits.gather(1, column), out=logprobs).sum(dim=1).long() + 1
    return Logprobs(own, ranks, ids, best)


def _best(ids: list[int], values: list[float], count: int) -> list[tuple[int, float]]:
    """The first `count`; the lowest id first among equals."""
    return sorted(zip(ids, values, strict=True), key=lambda entry: (-entry[1], entry[0]))[:count]
