"""How layers are split over the ranks of a tensor-parallel group, as in Megatron-LM (arXiv:1909.08053).

Projections into heads, or into the inside of an MLP, are split by output; projections back by input, and the ranks'
results are summed. The vocabulary is split by rows. The residual stream in between is replicated.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.attention.backend import HeadShape


class Span(NamedTuple):
    """`size` of `total` rows or columns, from `start` on; anything past `total` is padding."""

    start: int
    size: int
    total: int

    @property
    def filled(self) -> int:
        """Rows that are not padding."""
        return self.end - min(self.start, self.total)

    @property
    def end(self) -> int:
        """One past the last row that is not padding."""
        return min(self.start + self.size, self.total)

    def times(self, width: int) -> "Span":
        """The same span counted in rows, where each item is `width` rows."""
        return Span(self.start * width, self.size * width, self.total * width)


class Cut(NamedTuple):
    """The slice of a checkpoint's tensor that a rank holds."""

    dim: int
    span: Span

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indices into the whole tensor."""
        return (slice(None),) * self.dim + (slice(self.span.end - self.span.filled, self.span.end),)


class Shard:
    """A rank's share of a model, and its collectives. This base class is a single rank: nothing is exchanged."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks; may overwrite x."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[R, n] of every rank -> [R, n * size] on rank 0, in rank order. Undefined on other ranks."""
        return x

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x with rank 0's."""

    def all_min(self, number: int) -> int:
        """The minimum over all ranks."""
        return number

    def span(self, total: int, what: str) -> Span:
        """An equal share for every rank. Raises ValueError, naming `what`, if `total` is not divisible."""
        if total % self.size:
            raise ValueError(f"tensor_parallel = {self.size} does not divide {what} = {total}")
        each = total // self.size
        return Span(self.rank * each, each, total)

    def padded_span(self, total: int) -> Span:
        """An equal share for every rank, the last ones padded."""
        each = -(-total // self.size)
        return Span(self.rank * each, each, total)

    def query_heads(self, heads: HeadShape) -> Span:
        return self.span(heads.num_heads, "num_attention_heads")

    def kv_heads(self, heads: HeadShape) -> Span:
        """The KV heads that this rank's query heads read."""
        if self.size % heads.num_kv_heads:
            return self.span(heads.num_kv_heads, "num_key_value_heads")
        # More ranks than KV heads: several ranks hold a copy of the same one.
        return Span(self.rank * heads.num_kv_heads // self.size, 1, heads.num_kv_heads)

    def heads(self, heads: HeadShape) -> HeadShape:
        """This rank's share of the heads. Raises ValueError if the ranks cannot share them equally."""
        return replace(heads, num_heads=self.query_heads(heads).size, num_kv_heads=self.kv_heads(heads).size)


UNSHARDED = Shard()


class Place(NamedTuple):
    """Where and how a layer holds its weights."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard = UNSHARDED

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)
