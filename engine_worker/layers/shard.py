"""How layers are split over the ranks of a tensor-parallel group, as in Megatron-LM (arXiv:1909.08053).

Projections into heads, or into the intermediate dimension of an MLP, are split by output. Projections back to the
residual stream are split by input, and the ranks' results are summed. The vocabulary is split by rows. The residual
stream is replicated.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.attention.backend import HeadShape


class Span(NamedTuple):
    """`size` of `total` rows or columns, from `start` on; rows past `total` are padding."""

    start: int
    size: int
    total: int

    @property
    def filled(self) -> int:
        """Number of rows that are not padding."""
        return self.end - min(self.start, self.total)

    @property
    def end(self) -> int:
        """One past the last row that is not padding."""
        return min(self.start + self.size, self.total)

    def times(self, width: int) -> "Span":
        """The same span in a smaller unit: each of its items is `width` rows."""
        return Span(self.start * width, self.size * width, self.total * width)


class Cut(NamedTuple):
    """The slice of a checkpoint's tensor that a rank loads."""

    dim: int
    span: Span

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the slice in the whole tensor."""
        return (slice(None),) * self.dim + (slice(self.span.end - self.span.filled, self.span.end),)


class Shard:
    """A rank's share of a model, and its collective operations. This base class is a single rank, which communicates
    with no other."""

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

    def span(self, total: int, name: str) -> Span:
        """This rank's share, which is equally large on every rank. Raises ValueError, with the name of the dimension,
        if `total` is not divisible by the number of ranks."""
        if total % self.size:
            raise ValueError(f"tensor_parallel = {self.size} does not divide {name} = {total}")
        share = total // self.size
        return Span(self.rank * share, share, total)

    def padded_span(self, total: int) -> Span:
        """This rank's share, which is equally large on every rank; the last ranks' shares are padded."""
        share = -(-total // self.size)
        return Span(self.rank * share, share, total)

    def query_heads(self, heads: HeadShape) -> Span:
        return self.span(heads.num_heads, "num_attention_heads")

    def kv_heads(self, heads: HeadShape) -> Span:
        """The KV heads that this rank's query heads read."""
        if self.size % heads.num_kv_heads:
            return self.span(heads.num_kv_heads, "num_key_value_heads")
        # More ranks than KV heads: several ranks have a copy of the same KV head.
        return Span(self.rank * heads.num_kv_heads // self.size, 1, heads.num_kv_heads)

    def heads(self, heads: HeadShape) -> HeadShape:
        """This rank's share of the heads. Raises ValueError if the ranks cannot share them equally."""
        return replace(heads, num_heads=self.query_heads(heads).size, num_kv_heads=self.kv_heads(heads).size)


UNSHARDED = Shard()


class Place(NamedTuple):
    """Type, device and share of a layer's weights."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard = UNSHARDED

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def matrix(self, *shape: int) -> Tensor:
        """[outputs, inputs], or one for each expert."""
        return self.empty(*shape)


class DeferredPlace(Place):
    """A place where a matrix takes no memory before `Layer.hold` reads it."""

    def matrix(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device="meta")
