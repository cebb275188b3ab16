"""How layers are split over the ranks of a group, as in Megatron-LM (arXiv:1909.08053).

Maps into heads, or into the inside of an MLP, are split by their outputs; maps back by their inputs, and what they give
is summed over the ranks. The vocabulary is split by rows. What lies between, the residual stream, every rank has.
"""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from engine_worker.attention.backend import HeadShape


class Part(NamedTuple):
    """Of `total` rows or columns the `size` from `start` on; what of these lies past the total is padding."""

    start: int
    size: int
    total: int

    @classmethod
    def whole(cls, total: int) -> "Part":
        """All of them."""
        return cls(0, total, total)

    @property
    def filled(self) -> int:
        """How many of them are no padding."""
        return self.end - min(self.start, self.total)

    @property
    def end(self) -> int:
        """Past the last of these."""
        return min(self.start + self.size, self.total)

    def times(self, width: int) -> "Part":
        """The same of things that are `width` rows each."""
        return Part(self.start * width, self.size * width, self.total * width)


class Cut(NamedTuple):
    """Which part of a checkpoint's tensor a rank has."""

    dim: int
    part: Part


class Shard:
    """One rank's share of a model, and what the ranks exchange. This one is alone, and exchanges nothing."""

    rank: int = 0
    size: int = 1

    def reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place where there are others."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[R, n] of every rank, the same n -> [R, n * size] in rank 0, in order of ranks. What the others get means
        nothing."""
        return x

    def share(self, x: Tensor) -> None:
        """Rank 0's, in place, for all."""

    def least(self, number: int) -> int:
        """Of the numbers of all ranks."""
        return number

    def part(self, total: int, what: str) -> Part:
        """As much for every rank. Raises ValueError where that cannot be; `what` names it."""
        if total % self.size:
            raise ValueError(f"tensor_parallel = {self.size} does not divide {what} = {total}")
        each = total // self.size
        return Part(self.rank * each, each, total)

    def padded_part(self, total: int) -> Part:
        """As much for every rank, with padding at the end."""
        each = -(-total // self.size)
        return Part(self.rank * each, each, total)

    def query_heads(self, heads: HeadShape) -> Part:
        """Raises ValueError."""
        return self.part(heads.num_heads, "num_attention_heads")

    def kv_heads(self, heads: HeadShape) -> Part:
        """Those that this rank's query heads read. Where there are more ranks than KV heads, several have the same.
        Raises ValueError."""
        if self.size % heads.num_kv_heads:
            return self.part(heads.num_kv_heads, "num_key_value_heads")
        return Part(self.rank * heads.num_kv_heads // self.size, 1, heads.num_kv_heads)

    def heads(self, heads: HeadShape) -> HeadShape:
        """The shape of this rank's. Raises ValueError."""
        return replace(heads, num_heads=self.query_heads(heads).size, num_kv_heads=self.kv_heads(heads).size)


ALONE = Shard()
