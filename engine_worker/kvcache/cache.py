"""Who holds which blocks: block tables, given out and taken back whole."""

from collections import Counter, abc

from engine_worker.kvcache.forecast import Forecast
from engine_worker.kvcache.pool import BlockPool, CacheCorruptError
from engine_worker.kvcache.prefix import Prefix, PrefixFinder
from engine_worker.request import Sequence


class KvCache:
    """Gives sequences their blocks and takes them back. A sequence that holds memory has blocks for all its tokens."""

    def __init__(self, num_blocks: int, tokens_per_block: int, reuse: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.tokens_per_block = tokens_per_block
        self.holders: dict[Sequence, None] = {}
        """Sequences that hold memory."""
        self.prompt_tokens = 0
        """Of requests scheduled since the start."""
        self.cached_tokens = 0
        """Of those, served from the cache."""
        self._prefixes = PrefixFinder(self.pool, tokens_per_block, reuse)

    @property
    def hit_ratio(self) -> float:
        """Prompt tokens served from the cache over prompt tokens, since the start."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.tokens_per_block)

    def forecast(self) -> Forecast:
        """To try who would fit, without moving a block."""
        return Forecast(self.pool, self._prefixes, self.tokens_per_block)

    def allocate(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """Give each of these blocks for all its tokens, all or nothing for each one; returns those that have them.

        What is found in the cache is held for all of them before a new block is taken: none evicts another's prefix.
        """
        size = self.tokens_per_block
        pinned = {sequence: self._pin(sequence) for sequence in sequences if not sequence.blocks}
        return [
            sequence
            for sequence in sequences
            if sequence.num_tokens <= len(sequence.blocks) * size or self._complete(sequence, pinned.get(sequence))
        ]

    def commit(self, sequence: Sequence, count: int) -> None:
        """The next `count` tokens of a holder were computed."""
        start, size = sequence.num_computed, self.tokens_per_block
        end = sequence.num_computed = start + count
        self._drop_copy(sequence)
        if start // size < end // size:
            self._prefixes.publish(sequence, range(start // size, end // size))

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's blocks back. Its tail goes first, so of a cached prefix the tail is evicted first."""
        self._drop_copy(sequence)
        for block in reversed(sequence.blocks):
            self.pool.release(block)
        sequence.blocks = []
        sequence.num_computed = 0
        self.holders.pop(sequence, None)

    def flush(self) -> int:
        """Forget every prefix; returns the number of blocks freed. Sequences that live keep theirs."""
        return self.pool.flush()

    def note_prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request was scheduled for the first time, with so much of its prompt from the cache."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def check(self) -> None:
        """Raise CacheCorruptError unless the books balance and a block that is still written is in one table only."""
        tables = Counter(block for holder in self.holders for block in holder.blocks)
        copied = Counter(holder.copy[0] for holder in self.holders if holder.copy is not None)
        self.pool.check(tables + copied)
        for holder in self.holders:
            held, computed, tokens = len(holder.blocks), holder.num_computed, holder.num_tokens
            if not self.blocks_for(max(computed, 1)) <= held <= self.blocks_for(tokens):
                raise CacheCorruptError(f"{held} blocks for {computed} of {tokens} tokens")
            for block in holder.blocks[computed // self.tokens_per_block :]:
                if tables[block] > 1:
                    raise CacheCorruptError(f"block {block} is written by one sequence and in the table of another")

    def _pin(self, sequence: Sequence) -> Prefix:
        prefix = self._prefixes.find(sequence)
        for block in prefix.held:
            self.pool.hold(block)
        return prefix

    def _complete(self, sequence: Sequence, pinned: Prefix | None) -> bool:
        """Take the blocks that a sequence lacks; without enough of them, let go of what was pinned for it."""
        table = sequence.blocks if pinned is None else pinned.blocks
        lacking = self.blocks_for(sequence.num_tokens) - len(table)
        if lacking > self.pool.available:
            for block in reversed(pinned.held if pinned is not None else ()):
                self.pool.release(block)
            return False
        new = [self.pool.take() for _ in range(lacking)]
        table.extend(new)
        if pinned is not None:
            sequence.blocks = table
            sequence.num_computed = pinned.num_computed
            sequence.copy = None if pinned.copy_from is None else (pinned.copy_from, new[0])
            self.holders[sequence] = None
        return True

    def _drop_copy(self, sequence: Sequence) -> None:
        if sequence.copy is not None:
            self.pool.release(sequence.copy[0])
            sequence.copy = None
