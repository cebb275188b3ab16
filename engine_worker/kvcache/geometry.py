"""How many blocks a number of tokens needs: arithmetic of block size, attention window and chunk size."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes in tokens."""

    tokens_per_block: int
    window: int | None = None
    """Tokens that a token attends to at most, itself included; None: all."""
    chunk: int | None = None
    """Limit on tokens of one sequence in a step; None: no limit, or no window."""

    @classmethod
    def fit(cls, num_blocks: int, tokens_per_block: int, window: int | None, chunk: int | None) -> "Geometry":
        """For a pool of `num_blocks`: a window that exceeds the pool is ignored, chunks are cut to the room beside
        it."""
        if window is None:
            return cls(tokens_per_block)
        # A window rarely starts at a block boundary, so it may touch one block more than it fills.
        room = num_blocks * tokens_per_block - tokens_per_block - (window - 1) + 1
        if room < 1:
            return cls(tokens_per_block)
        return cls(tokens_per_block, window, None if chunk is None else min(chunk, room))

    @property
    def bounded(self) -> bool:
        """Whether the blocks of a sequence are bounded, however long it gets."""
        return self.chunk is not None

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks for this many tokens, rounded up."""
        return -(-num_tokens // self.tokens_per_block)

    def first_needed(self, position: int) -> int:
        """Index of the first block that tokens from `position` on attend to."""
        if self.window is None or position < self.window:
            return 0
        return (position - self.window + 1) // self.tokens_per_block

    def table_length(self, num_computed: int, num_tokens: int) -> int:
        """Length of a block table before the next step: for all tokens, or as many as that step can reach."""
        reached = num_tokens if self.chunk is None else min(num_tokens, num_computed + self.chunk)
        return self.blocks_for(reached)

    def max_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence holds at once, at most, on its way to `num_tokens`."""
        blocks = self.blocks_for(num_tokens)
        if self.window is None or self.chunk is None:
            return blocks
        return min(blocks, self.blocks_for(self.window - 1 + self.chunk + self.tokens_per_block - 1))

    def longest(self, num_blocks: int) -> int | None:
        """Tokens that a sequence with the pool to itself can reach; None: any number."""
        if self.chunk is None:
            return num_blocks * self.tokens_per_block
        return None
