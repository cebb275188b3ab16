"""Who would fit: the arithmetic of releasing, growing and admitting, without moving a block."""

from collections.abc import Iterable

from engine_worker.kvcache.pool import BlockPool
from engine_worker.kvcache.prefix import PrefixFinder
from engine_worker.request import Sequence


class Forecast:
    """The pool as it would be. What fits here, `KvCache.allocate` gives after the same releases."""

    def __init__(self, pool: BlockPool, prefixes: PrefixFinder, tokens_per_block: int) -> None:
        self.num_blocks = pool.num_blocks
        self.available = pool.available
        self._references = pool.references
        self._change: dict[int, int] = {}
        self._prefixes = prefixes
        self._tokens_per_block = tokens_per_block

    def grow(self, sequence: Sequence) -> bool:
        """Blocks for all tokens of a holder; where they are not there, False, and nothing changes."""
        if sequence.num_tokens <= len(sequence.blocks) * self._tokens_per_block:
            return True
        lacking = self._lacking(sequence, len(sequence.blocks))
        if lacking > self.available:
            return False
        self.available -= lacking
        return True

    def admit(self, sequence: Sequence, headroom: int) -> bool:
        """Blocks for all tokens of a sequence without memory, and `headroom` more; else False, and nothing changes."""
        prefix = self._prefixes.find(sequence)
        lacking = self._lacking(sequence, len(prefix.blocks))
        taken = lacking + sum(not self._held(block) for block in prefix.held)
        if taken + headroom > self.available:
            return False
        self.available -= taken
        self._hold(prefix.held, 1)
        return True

    def release(self, sequence: Sequence) -> None:
        """The blocks of a holder that has not grown in this forecast."""
        held = sequence.blocks if sequence.copy is None else [*sequence.blocks, sequence.copy[0]]
        self._hold(held, -1)
        self.available += sum(not self._held(block) for block in held)

    def growth(self, sequence: Sequence, tokens: int) -> int:
        """Blocks for so many more tokens of a sequence, or as many as it may get, beyond those for all it has now."""
        now, size = sequence.num_tokens, self._tokens_per_block
        return -(-min(now + tokens, sequence.request.max_tokens) // size) + -now // size

    def growth_to_end(self, sequence: Sequence) -> int:
        """Blocks that a sequence may still come to need beyond those for all its tokens."""
        return self.growth(sequence, sequence.request.max_tokens)

    def blocks_to_end(self, sequence: Sequence) -> int:
        """Blocks that a sequence without memory may come to need with nothing in the cache."""
        return -(-sequence.num_tokens // self._tokens_per_block) + self.growth_to_end(sequence)

    def _lacking(self, sequence: Sequence, blocks: int) -> int:
        return -(-sequence.num_tokens // self._tokens_per_block) - blocks

    def _held(self, block: int) -> bool:
        return self._references[block] + self._change.get(block, 0) > 0

    def _hold(self, blocks: Iterable[int], change: int) -> None:
        for block in blocks:
            self._change[block] = self._change.get(block, 0) + change
