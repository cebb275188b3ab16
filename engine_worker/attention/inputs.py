"""Where each token of a step stands: what attention needs besides query, key and value."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """T tokens of B sequences. Tokens of a sequence are adjacent; its query is the last `query` of its `context`
    tokens.

    Tokens at or after `query_start[B]` are padding: they belong to no sequence, their slots are -1 and their output
    means nothing. Every sequence has a token at least. A sequence of context length 0 is padding too.
    """

    slots: Tensor
    """[T] int64: where each token's key and value go, block * tokens_per_block + offset; -1 writes nothing."""
    block_tables: Tensor
    """[B, M] int32: blocks of each sequence in order; entries past its context are never read, nor are those that lie
    wholly behind the window of its first query token."""
    query_start: Tensor
    """[B + 1] int32: first token of each sequence, and the end of the last."""
    context_lengths: Tensor
    """[B] int32: the sequence's tokens in these blocks, its last one included; where nothing is behind the window, all.
    """
    generation_rows: int
    """Sequences in front that have one token each."""
    max_query: int
    """Longest query, or more."""
    max_context: int
    """Longest context, or more: where a step is captured as a graph, what its tables can hold."""

    @property
    def generation(self) -> bool:
        """One token of every sequence and no padding after them: B = T. Known without a look at the tensors."""
        return self.generation_rows == len(self.slots)


@dataclass(frozen=True, slots=True)
class PagedInputs(AttentionInputs):
    """The inputs, and what a kernel may need beside them."""

    key_start: Tensor | None
    """[B + 1] int32: where keys would begin if those of the sequences stood one after the other. In a generation step
    only its shape is right: graphs replay that, and no kernel looks. None where the kernel does not ask for it."""
