"""What the model itself thought of the chosen tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from sluice.ring.wire import TokenLogprob


class Scores(NamedTuple):
    """Of N chosen tokens and of the most likely ones beside them."""

    own: Tensor
    """[N] float32: log-softmax of the model's logits, before any edit or filter."""
    ranks: Tensor
    """[N] int64: one more than the number of tokens that are more likely."""
    ids: Tensor
    """[N, K] int64."""
    best: Tensor
    """[N, K] float32: log-softmax of `ids`, best first."""

    def entries(self, wanted: Sequence[int]) -> list[TokenLogprob]:
        """As plain data, with so many alternatives each."""
        columns = zip(*(column.tolist() for column in self), wanted, strict=True)
        return [TokenLogprob(own, rank, _best(ids, scores, count)) for own, rank, ids, scores, count in columns]


def score(logits: Tensor, tokens: Tensor, most: int) -> Scores:
    """Logits [N, vocab] at tokens [N], with `most` alternatives."""
    log_total = logits.logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = (logits > chosen).sum(dim=1) + 1
    values, ids = logits.topk(min(most, logits.shape[1]), dim=1)
    return Scores((chosen - log_total).squeeze(1), ranks, ids, values - log_total)


def _best(ids: list[int], values: list[float], count: int) -> list[tuple[int, float]]:
    """The first `count`; of equals the lowest id first."""
    return sorted(zip(ids, values, strict=True), key=lambda entry: (-entry[1], entry[0]))[:count]
