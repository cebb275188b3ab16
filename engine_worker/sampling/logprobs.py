"""What the model itself thought of the chosen tokens."""

from collections.abc import Sequence

from torch import Tensor

from sluice.ring.wire import TokenLogprob


def logprobs(logits: Tensor, tokens: Tensor, wanted: Sequence[int]) -> list[TokenLogprob]:
    """Natural log-softmax of the model's logits [N, vocab], before any edit or filter, at tokens [N]; `wanted`
    alternatives each.

    The rank of a token is one more than the number of tokens that are more likely.
    """
    log_total = logits.logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = (logits > chosen).sum(dim=1) + 1
    values, ids = logits.topk(min(max(wanted), logits.shape[1]), dim=1)
    columns = zip(
        (chosen - log_total).squeeze(1).tolist(),
        ranks.tolist(),
        ids.tolist(),
        (values - log_total).tolist(),
        wanted,
        strict=True,
    )
    return [TokenLogprob(own, rank, _best(row, scores, count)) for own, rank, row, scores, count in columns]


def _best(ids: list[int], values: list[float], count: int) -> list[tuple[int, float]]:
    """The first `count`; of equals the lowest id first."""
    return sorted(zip(ids, values, strict=True), key=lambda entry: (-entry[1], entry[0]))[:count]
