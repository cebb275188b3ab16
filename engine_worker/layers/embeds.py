"""Rows of prompt tables in place of the embeddings of tokens."""

from typing import NamedTuple

from torch import Tensor


class Embeds(NamedTuple):
    tokens: Tensor
    """[V] int64: which tokens of a step they belong to; the ids there are arbitrary."""
    rows: Tensor
    """[V, hidden] float32."""

    def lay_over(self, x: Tensor) -> None:
        """x [T, hidden]: the embeddings of a step's tokens, changed in place."""
        x.index_copy_(0, self.tokens, self.rows.to(x.dtype))
