"""The layout of a step's tokens: what attention needs besides query, key and value."""

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """T tokens of B sequences. A sequence's tokens are adjacent; its query is the end of its context.

    Tokens from `query_start[B]` on are padding: they belong to no sequence, their slots are -1 and their output is
    undefined. Every sequence has at least one token. A sequence with context length 0 is padding too.
    """

    slots: Tensor
    """[T] int64: where each token's key and value go, block * tokens_per_block + offset; -1: nowhere."""
    block_tables: Tensor
    """[B, M] int32: each sequence's blocks in order. Entries past its context are never read, nor are those wholly
    behind the window of its first query token."""
    query_start: Tensor
    """[B + 1] int32: index of each sequence's first token, and the end of the last."""
    context_lengths: Tensor
    """[B] int32: tokens of the sequence in its block table, its last query token included. Without a window that is
    the whole sequence."""
    generation_rows: int
    """Leading sequences that have one token each."""
    max_query: int
    """At least the longest query."""
    max_context: int
    """At least the longest context; in a captured graph the most that its block tables can hold."""

    @property
    def generation(self) -> bool:
        """Every sequence has one token and no padding follows: B = T. Known without reading tensors."""
        return self.generation_rows == len(self.slots)

    def shared(self) -> dict[str, Any]:
        """The fields by name, for a backend's own kind of inputs."""
        return {field.name: getattr(self, field.name) for field in fields(AttentionInputs)}


@dataclass(frozen=True, slots=True)
class PagedInputs(AttentionInputs):
    """`AttentionInputs` with what some kernels need in addition."""

    key_start: Tensor | None
    """[B + 1] int32: where each sequence's keys would begin if they were contiguous. In a generation step only its
    shape is right. None if the kernel does not need it."""
