"""Top-k, top-p and min-p over candidates in falling order, with the meaning they have in transformers.

A filter is a threshold: tokens of equal probability stay or go together, so the result does not depend on how a sort
breaks ties.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.ring.params import SamplingParams


class Filters(NamedTuple):
    """One entry per row, [N, 1]."""

    top_k: Tensor
    """int64; 0 is off."""
    top_p: Tensor | None
    """float64; 1 is off. None where it is off in all rows."""
    min_p: Tensor | None
    """float32; 0 is off. None where it is off in all rows."""

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> "Filters":
        """In order of the rows."""
        top_p, min_p = [[p.top_p] for p in params], [[p.min_p] for p in params]
        return Filters(
            torch.tensor([[p.top_k] for p in params]),
            torch.tensor(top_p, dtype=torch.float64) if min(top_p) < [1.0] else None,
            torch.tensor(min_p) if max(min_p) > [0.0] else None,
        )

    def rows(self, index: Tensor) -> "Filters":
        """Some of them, [n] int64."""
        top_p, min_p = (None if column is None else column[index] for column in (self.top_p, self.min_p))
        return Filters(self.top_k[index], top_p, min_p)


def keep(scaled: Tensor, filters: Filters, mass: Tensor | None, *, whole: bool) -> tuple[Tensor, Tensor]:
    """Which candidates pass, and which rows need more candidates to tell.

    scaled [N, C]: the most likely tokens' logits over temperature, falling. mass [N, 1]: sum over the vocabulary of
    exp(scaled logit - the highest), read where there is a top-p and no top-k. whole: the candidates are the vocabulary.
    Returns ([N, C] bool, [N] bool).
    """
    limited = filters.top_k > 0
    last = torch.where(limited, filters.top_k, scaled.shape[1]).clamp_(max=scaled.shape[1]) - 1
    kept = scaled >= scaled.gather(1, last)
    needs_more = limited.squeeze(1) & kept[:, -1]
    if filters.top_p is not None:
        weights = (scaled.double() - scaled[:, :1]).exp_().masked_fill_(~kept, 0.0)
        total = weights.sum(dim=1, keepdim=True)
        total = total if mass is None else torch.where(limited, total, mass)
        before = weights.cumsum(dim=1) - weights
        inside = (before < filters.top_p * total) | (filters.top_p >= 1.0)
        # A row of nothing but -inf or NaN has nothing inside; the caller finds it out.
        smallest = scaled.gather(1, (inside.sum(dim=1, keepdim=True) - 1).clamp_(min=0))
        kept &= scaled >= smallest
    if filters.min_p is not None:
        kept &= scaled >= scaled[:, :1] + filters.min_p.log()
    needs_more |= kept[:, -1]
    # Below a candidate of -inf there is nothing that could pass.
    needs_more &= scaled[:, -1] > -torch.inf
    return kept, torch.zeros_like(needs_more) if whole else needs_more
