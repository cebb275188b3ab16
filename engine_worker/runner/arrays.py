"""A step as plain arrays: what every rank computes it from, and what can be sent to it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Arrays:
    """T tokens of B slices. See `AttentionInputs` for those that attention needs."""

    token_ids: NDArray[np.int64]
    """[T]. What follows a draw of the step before is not known yet: any number."""
    positions: NDArray[np.int64]
    """[T]."""
    slots: NDArray[np.int64]
    """[T]."""
    block_tables: NDArray[np.int32]
    """[B, M]."""
    query_start: NDArray[np.int32]
    """[B + 1]."""
    context_lengths: NDArray[np.int32]
    """[B]."""
    last_tokens: NDArray[np.int64] | None
    """[R]: the tokens whose logits are needed; None when they are all T."""
    follow_tokens: NDArray[np.int64]
    """[F]: which of `token_ids` the step before gives."""
    follow_draws: NDArray[np.int64]
    """[F]: the draws of the step before, in its order, that give them."""
    generation_rows: int
    """Slices in front that have one token each."""
    max_query: int
    """Longest query."""
    max_context: int
    """Longest context."""
