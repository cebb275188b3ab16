"""Draft tokens with logits from the caller. Unlike other drafts, they change how tokens are sampled."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_worker.step import Proposal
from sluice.wire.params import DraftLogits, SamplingParams, Speculation
from sluice.wire.tensors import BYTES

STORED: dict[str, str] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""numpy's name of each data type. It has no bfloat16, which is the upper half of a float32."""


class Proposals:
    """The draft tokens of one request."""

    def __init__(self, tokens: Sequence[int], logits: DraftLogits, threshold: float | None) -> None:
        """`logits`: a row per token. `threshold`: see `Proposal`."""
        self._tokens = list(tokens)
        self._rows: NDArray[Any] = np.frombuffer(logits.data, STORED[logits.dtype]).reshape(len(tokens), -1)
        self._threshold = threshold

    @staticmethod
    def of(speculation: Speculation, sampling: SamplingParams) -> "Proposals | None":
        """None if the request has no draft logits, or if they make no difference."""
        # In greedy sampling the draft logits do not matter: the most likely token is accepted and replaces any other.
        if speculation.draft_logits is None or sampling.greedy:
            return None
        return Proposals(speculation.draft_token_ids, speculation.draft_logits, speculation.acceptance_threshold)

    def after(self, output: Sequence[int], drafted: Sequence[int] = ()) -> Proposal | None:
        """The proposal for the token after these; None once the output differs from the draft."""
        position = len(output) + len(drafted)
        if position >= len(self._tokens) or self._tokens[:position] != [*output, *drafted]:
            return None
        return Proposal(self._tokens[position], _widened(self._rows[position]), self._threshold)

    def invalid_row(self) -> int | None:
        """Index of the first row that is no distribution, because its maximum is NaN or infinite."""
        return next((i for i, row in enumerate(self._rows) if not np.isfinite(_widened(row).max())), None)


def proposals_problem(speculation: Speculation, sampling: SamplingParams, vocab_size: int) -> str | None:
    """Why the request's draft logits are invalid; None if they are valid."""
    logits, count = speculation.draft_logits, len(speculation.draft_token_ids)
    if logits is None:
        return None
    if sampling.beam_search is not None:
        return "draft_logits cannot be combined with beam search"
    size = count * vocab_size * BYTES[logits.dtype]
    if not size or len(logits.data) != size:
        rows = f"{vocab_size} logits in {logits.dtype} for each of {count} draft tokens"
        return f"has {len(logits.data)} bytes, must have {size}: {rows}"
    row = Proposals(speculation.draft_token_ids, logits, None).invalid_row()
    return None if row is None else f"must have a finite maximum in each row: row {row} has NaN, +inf or only -inf"


def _widened(row: NDArray[Any]) -> NDArray[np.float32]:
    return (row.astype("<u4") << 16).view("<f4") if row.dtype == "<u2" else row.astype(np.float32, copy=False)
