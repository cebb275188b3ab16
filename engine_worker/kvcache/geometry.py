"""How many blocks so many tokens need: arithmetic of block size, attention window and chunk."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Geometry:
    """What of a sequence has to lie in blocks."""

    tokens_per_block: int
    window: int | None = None
    """Tokens that a token sees at most, itself included; None: all."""
    chunk: int | None = None
    """Tokens of one sequence that a step computes at most; None: as many as it has, or there is no window."""

    @classmethod
    def fit(cls, num_blocks: int, tokens_per_block: int, window: int | None, chunk: int | None) -> "Geometry":
        """For so many blocks: a window that they cannot hold is none, and chunks are no longer than what is left."""
        if window is None:
            return cls(tokens_per_block)
        room = num_blocks * tokens_per_block - tokens_per_block - (window - 1) + 1
        if room < 1:
            return cls(tokens_per_block)
        return cls(tokens_per_block, window, None if chunk is None else min(chunk, room))

    @property
    def bounded(self) -> bool:
        """However long a sequence gets, it holds so many blocks at most."""
        return self.chunk is not None

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.tokens_per_block)

    def first_needed(self, position: int) -> int:
        """Index of the first block that the tokens from this position on still see."""
        if self.window is None or position < self.window:
            return 0
        return (position - self.window + 1) // self.tokens_per_block

    def placed(self, num_computed: int, num_tokens: int) -> int:
        """Tokens, from the first, that need a place before the next step: all, or as far as that step can come."""
        if self.chunk is None:
            return num_tokens
        return min(num_tokens, num_computed + self.chunk)

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence holds at once, at most, on its way to so many tokens."""
        blocks = self.blocks_for(num_tokens)
        if self.window is None or self.chunk is None:
            return blocks
        return min(blocks, self.blocks_for(self.window - 1 + self.chunk + self.tokens_per_block - 1))

    def longest(self, num_blocks: int) -> int | None:
        """Tokens that a sequence alone can come to in so many blocks; None: any number."""
        if self.chunk is None:
            return num_blocks * self.tokens_per_block
        return None
