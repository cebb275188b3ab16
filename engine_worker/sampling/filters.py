"""Top-k, top-p and min-p over candidates in falling order, with the meaning they have in transformers.

A filter is a threshold: tokens of equal probability stay or go together, so the result does not depend on how a sort
breaks ties.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.ring.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Filters:
    """One entry per row, [N, 1]."""

    top_k: Tensor
    """int64; 0 is off."""
    top_p: Tensor
    """float64; 1 is off."""
    min_p_log: Tensor
    """float32, natural logarithm; -inf is off."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> "Filters":
        """In order of the rows."""
        return cls(
            torch.tensor([[p.top_k] for p in params], device=device),
            torch.tensor([[p.top_p] for p in params], dtype=torch.float64, device=device),
            torch.tensor([[p.min_p] for p in params], device=device).log_(),
        )

    def select(self, rows: Tensor) -> "Filters":
        """Of some rows."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p_log[rows])


def keep(scaled: Tensor, filters: Filters, log_total: Tensor, *, whole: bool) -> tuple[Tensor, Tensor]:
    """Which candidates pass, and which rows need more candidates to tell.

    scaled [N, C]: the most likely tokens' logits over temperature, falling. log_total [N, 1]: logsumexp over the
    vocabulary, read where top-k is off. whole: the candidates are the vocabulary. Returns ([N, C] bool, [N] bool).
    """
    limited = filters.top_k > 0
    last = (torch.where(limited, filters.top_k, scaled.shape[1]) - 1).clamp_(max=scaled.shape[1] - 1)
    kept = scaled >= scaled.gather(1, last)
    cut_short = limited.squeeze(1) & kept[:, -1]
    log_kept = scaled.where(kept, -torch.inf).double()
    total = torch.where(limited, log_kept.logsumexp(dim=1, keepdim=True), log_total)
    probabilities = (log_kept - total).exp_()
    before = probabilities.cumsum(dim=1) - probabilities
    nucleus = kept & ((before < filters.top_p) | (filters.top_p >= 1.0))
    smallest = scaled.gather(1, nucleus.sum(dim=1, keepdim=True).sub_(1).clamp_(min=0))
    kept = (scaled >= smallest) & (scaled >= scaled[:, :1] + filters.min_p_log)
    needs_more = torch.zeros_like(cut_short) if whole else cut_short | kept[:, -1]
    return kept, needs_more
