"""The filters top-k, top-p and min-p."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.wire.params import SamplingParams


class Filters(NamedTuple):
    """Each [N, 1], a row per draw."""

    top_k: Tensor
    """int64; 0 is off."""
    top_p: Tensor | None
    """float64; 1 is off. None if it is off in all rows."""
    min_p: Tensor | None
    """float32; 0 is off. None if it is off in all rows."""

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> "Filters":
        top_p, min_p = [[p.top_p] for p in params], [[p.min_p] for p in params]
        return Filters(
            torch.tensor([[p.top_k] for p in params]),
            torch.tensor(top_p, dtype=torch.float64) if min(top_p) < [1.0] else None,
            torch.tensor(min_p) if max(min_p) > [0.0] else None,
        )

    def rows(self, index: Tensor | slice) -> "Filters":
        """The rows at `index`: [n] int64, or a slice."""
        top_p, min_p = (None if column is None else column[index] for column in (self.top_p, self.min_p))
        return Filters(self.top_k[index], top_p, min_p)


def keep(scaled: Tensor, filters: Filters, mass: Tensor | None, *, whole: bool) -> tuple[Tensor, Tensor]:
    """Which candidates pass, [N, C] bool, and which rows need more candidates to decide, [N] bool.

    scaled [N, C]: logits over temperature of the most likely tokens, descending. mass [N, 1]: sum over the vocabulary
    of exp(scaled logit - the highest), used in rows with a top-p and no top-k. whole: the candidates are the
    vocabulary.
    """
    limited = filters.top_k > 0
    last = torch.where(limited, filters.top_k, scaled.shape[1]).clamp_(max=scaled.shape[1]) - 1
    kept = scaled >= scaled.gather(1, last)
    # While the last candidate passes, tokens beyond the candidates might pass too.
    needs_more = limited.squeeze(1) & kept[:, -1]
    if filters.top_p is not None:
        weights = (scaled.double() - scaled[:, :1]).exp_().masked_fill_(~kept, 0.0)
        total = weights.sum(dim=1, keepdim=True)
        total = total if mass is None else torch.where(limited, total, mass)
        # The token that crosses top_p is kept, as in transformers: only the mass before a token counts.
        mass_before = weights.cumsum(dim=1) - weights
        inside = (mass_before < filters.top_p * total) | (filters.top_p >= 1.0)
        # Tokens as likely as the last one inside are kept too: the sort orders them arbitrarily.
        # In a row of only -inf or NaN nothing is inside; the caller marks such rows as not valid.
        smallest = scaled.gather(1, (inside.sum(dim=1, keepdim=True) - 1).clamp_(min=0))
        kept &= scaled >= smallest
    if filters.min_p is not None:
        kept &= scaled >= scaled[:, :1] + filters.min_p.log()
    needs_more |= kept[:, -1]
    # No token after a candidate of -inf can pass.
    needs_more &= scaled[:, -1] > -torch.inf
    return kept, torch.zeros_like(needs_more) if whole else needs_more


Thresholds = Callable[[Tensor, Tensor, Filters], tuple[Tensor, Tensor]]
"""(scores [N, vocab] float32, temperature [N, 1] float32, filters) -> (thresholds [N, 1] float32, valid [N] bool).

A token passes if its score over temperature is not below the threshold of its row. A row is valid if it has a token to
choose: not if all scores are -inf, or one is NaN or +inf; the threshold is then -inf."""


def torch_thresholds(scores: Tensor, temperature: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """`Thresholds` in plain torch, by sorting the vocabulary; the reference for kernels."""
    ordered = scores.sort(dim=1, descending=True).values
    scaled, valid = ordered / temperature, ordered[:, 0].abs() < torch.inf
    kept, _ = keep(scaled, filters, None, whole=True)
    lowest = scaled.masked_fill(~kept, torch.inf).amin(dim=1, keepdim=True)
    return lowest.masked_fill(~valid[:, None], -torch.inf), valid
