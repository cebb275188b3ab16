"""Rejection sampling (Leviathan et al. 2023). A draft token sampled from a distribution q is accepted with probability
min(1, p / q), where p is the distribution of the request; otherwise a token is sampled from max(0, p - q), normalized.
The result is distributed as p.

With a constant threshold, as in TensorRT-LLM, the draft token is accepted if p / q is at least the threshold. The
result is then distributed neither as p nor as q.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine_worker.sampling.choose import TORCH, Chosen, SamplingKernels, finite, keys_of, temperature_of
from engine_worker.sampling.filters import Filters, Thresholds, keep
from engine_worker.sampling.noise import uniform
from engine_worker.step import Draw

RANDOM = 0.0
"""In place of a threshold: accept at random, with the probability above."""
ROWS = 8
"""Rows computed at a time: a row takes more memory than those of other draws, and on a GPU the KV cache leaves only
what these need."""


class Rejection(NamedTuple):
    """A way to choose a token, for draws with a proposal. If a filter is on it sorts the vocabulary, unless there is a
    kernel of thresholds."""

    temperature: Tensor
    """[N, 1] float32."""
    keys: Tensor
    """[N, 1] int64, see `noise_key`."""
    filters: Filters
    limited: bool
    """Whether top-k or top-p is on in some row."""
    proposed: Tensor
    """[N, 1] int64: the draft tokens."""
    logits: Tensor
    """[N, vocab] float32: logits of q. In a row with NaN the draft token is rejected, and a token sampled from p."""
    thresholds: Tensor
    """[N, 1] float64."""

    @staticmethod
    def of(draws: Sequence[Draw]) -> "Rejection":
        proposals = [draw.proposal for draw in draws if draw.proposal is not None]
        sampling = [draw.sampling for draw in draws]
        return Rejection(
            temperature_of(draws),
            keys_of(draws),
            Filters.of(sampling),
            any(params.top_k or params.top_p < 1.0 for params in sampling),
            torch.tensor([[proposal.token] for proposal in proposals]),
            torch.from_numpy(np.stack([proposal.logits for proposal in proposals])),
            torch.tensor([[proposal.threshold or RANDOM] for proposal in proposals], dtype=torch.float64),
        )

    def __call__(self, scores: Tensor, *, widen: bool, kernels: SamplingKernels = TORCH) -> Chosen:  # noqa: ARG002
        parts = [
            self._rows(slice(start, start + ROWS))._choose(scores[start : start + ROWS], kernels)
            for start in range(0, len(scores), ROWS)
        ]
        return Chosen(torch.cat([part.tokens for part in parts]), torch.cat([part.valid for part in parts]))

    def _rows(self, rows: slice) -> "Rejection":
        columns = (column[rows] for column in (self.proposed, self.logits, self.thresholds))
        return Rejection(self.temperature[rows], self.keys[rows], self.filters.rows(rows), self.limited, *columns)

    def _choose(self, scores: Tensor, kernels: SamplingKernels) -> Chosen:
        filtered, valid = self._filtered(scores, kernels.thresholds)
        p, q = filtered.double().softmax(dim=1), self.logits.double().softmax(dim=1)
        thresholds = torch.where(self.thresholds == RANDOM, uniform(self.keys), self.thresholds)
        likely, drafted = p.gather(1, self.proposed), q.gather(1, self.proposed)
        # A draft token that is banned or filtered out is never accepted.
        accepted = (likely > 0) & (likely >= thresholds * drafted)
        remaining = (p - q).clamp_(min=0)
        # If p equals q, rounding may leave nothing of the difference.
        logits = torch.where(remaining.sum(dim=1, keepdim=True) > 0, remaining.log().float(), filtered)
        peaks, tokens = kernels.gumbel_max(logits, torch.ones_like(self.temperature), self.keys, None)
        sampled = tokens.gather(1, peaks.argmax(dim=1, keepdim=True))
        return Chosen(torch.where(accepted, self.proposed, sampled).squeeze(1), valid)

    def _filtered(self, scores: Tensor, thresholds: Thresholds | None) -> tuple[Tensor, Tensor]:
        """Logits of p [N, vocab], and whether each row has a token to choose, [N] bool."""
        if not self.limited:
            logits, best = scores / self.temperature, scores.amax(dim=1, keepdim=True)
            if self.filters.min_p is not None:
                logits.masked_fill_(logits < best / self.temperature + self.filters.min_p.log(), -torch.inf)
            return logits, finite(best.squeeze(1))
        if thresholds is not None:
            threshold, valid = thresholds(scores, self.temperature, self.filters)
            logits = scores / self.temperature
            return logits.masked_fill_(logits < threshold, -torch.inf), valid
        values, ids = scores.sort(dim=1, descending=True)
        scaled = values / self.temperature
        kept, _ = keep(scaled, self.filters, None, whole=True)
        logits = torch.empty_like(scores).scatter_(1, ids, scaled.masked_fill_(~kept, -torch.inf))
        return logits, finite(values[:, 0])
