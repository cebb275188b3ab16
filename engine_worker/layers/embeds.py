"""Rows of prompt tables in place of the embeddings of tokens."""

from typing import NamedTuple

from torch import Tensor


class Embeds(NamedTuple):
    tokens: Tensor
    """[V] int64: indexes, in the step, of the tokens that the rows belong to; these tokens' ids are placeholders."""
    rows: Tensor
    """[V, hidden] float32."""

    def replace_rows(self, x: Tensor) -> None:
        """Write the rows into the embeddings of a step's tokens, x [T, hidden]."""
        x.index_copy_(0, self.tokens, self.rows.to(x.dtype))
