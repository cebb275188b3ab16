"""Who would fit: the arithmetic of releasing, growing and admitting, without moving a block."""

from collections.abc import Iterable

from engine_worker.kvcache.frontier import Frontiers
from engine_worker.kvcache.geometry import Geometry
from engine_worker.kvcache.pool import BlockPool
from engine_worker.kvcache.prefix import Prefix, PrefixFinder
from engine_worker.request import Sequence


class Forecast:
    """The pool as it would be. What fits here, `KvCache.allocate` gives after the same releases."""

    def __init__(self, pool: BlockPool, finder: PrefixFinder, geometry: Geometry, frontiers: Frontiers) -> None:
        self.num_blocks = pool.num_blocks
        self.available = pool.available
        self._references = pool.references
        self._finder = finder
        self._geometry = geometry
        self._frontiers = frontiers
        self._prefixes: dict[Sequence, Prefix] = {}
        self._change: dict[int, int] = {}
        """Of the references of blocks."""
        self._loading: set[int] = set()
        """Host blocks that somebody admitted here will have loaded."""
        self._newcomers: dict[bytes, Sequence] = {}
        """Who of those admitted here will compute which block next."""
        self._released: set[Sequence] = set()

    def grow(self, sequence: Sequence) -> bool:
        """Blocks for what a holder may compute next; where they are not there, False, and nothing changes."""
        if sequence.num_tokens <= sequence.num_placed or sequence.complete:
            return True
        lacking = self._wanted(sequence, sequence.num_computed) - len(sequence.blocks)
        if lacking > self.available:
            return False
        self.available -= max(0, lacking)
        return True

    def admit(self, sequence: Sequence, headroom: int) -> bool:
        """The same for a sequence without memory, and `headroom` blocks more; else False, and nothing changes."""
        prefix = self._find(sequence)
        held, loading = prefix.held, [block for _, block in prefix.on_host if block not in self._loading]
        taken = self._wanted(sequence, prefix.num_computed) - len(prefix.blocks)
        # Shared blocks of a window are soon replaced by own ones: they are no saving.
        taken += len(held) + len(prefix.on_host) if self._geometry.bounded else self._unheld(held) + len(loading)
        if taken + headroom > self.available:
            return False
        self.available -= taken
        self._hold(held, 1)
        self._loading.update(loading)
        digest = self._finder.next_block(sequence, prefix.num_computed)
        if digest is not None:
            self._newcomers.setdefault(digest, sequence)
        return True

    def awaits(self, sequence: Sequence) -> bool:
        """Whether the block that a sequence without memory lacks next is just being computed by one ahead of it.

        If it waits until that is done, it finds the block in the cache. Only those behind wait for those ahead, and
        nobody waits for one that gave its memory back: so no two wait for each other, and none for ever.
        """
        if sequence.awaited is not None and self._ahead(sequence.awaited, sequence):
            return True
        sequence.awaited = None
        if self._frontiers or self._newcomers:
            digest = self._finder.missing(sequence, self._find(sequence))
            if digest is not None and self._ahead(digest, sequence):
                sequence.awaited = digest
        return sequence.awaited is not None

    def release(self, sequence: Sequence) -> None:
        """The blocks of a holder that has not grown in this forecast."""
        held = sequence.blocks[sequence.first_block :]
        self._hold(held, -1)
        self.available += self._unheld(held)
        self._released.add(sequence)

    def growth(self, sequence: Sequence, tokens: int) -> int:
        """Blocks for so many more tokens of a sequence, or as many as it may get, beyond those that it has or would
        be given now.
        """
        geometry = self._geometry
        most = geometry.most_blocks(min(sequence.num_tokens + tokens, sequence.request.max_tokens))
        if not geometry.bounded:
            return most - geometry.blocks_for(sequence.num_tokens)
        if sequence.blocks:
            # Only what it filled itself: others may still hold what it found when it gives that back.
            first, num_computed = max(sequence.first_block, sequence.num_found), sequence.num_computed
        else:
            prefix = self._find(sequence)
            first, num_computed = prefix.first_block, prefix.num_computed
        held = max(len(sequence.blocks), self._wanted(sequence, num_computed)) - first
        return max(0, most - held)

    def growth_to_end(self, sequence: Sequence) -> int:
        """Blocks that a sequence may still come to need beyond those that it has or would be given now."""
        return self.growth(sequence, sequence.request.max_tokens)

    def blocks_to_end(self, sequence: Sequence) -> int:
        """Blocks that a sequence without memory may come to need with nothing in the cache."""
        return self._geometry.most_blocks(sequence.request.max_tokens)

    def _find(self, sequence: Sequence) -> Prefix:
        prefix = self._prefixes.get(sequence)
        if prefix is None:
            prefix = self._prefixes[sequence] = self._finder.find(sequence)
        return prefix

    def _wanted(self, sequence: Sequence, num_computed: int) -> int:
        """Length of its block table in the next step."""
        return self._geometry.blocks_for(self._geometry.placed(num_computed, sequence.num_tokens))

    def _ahead(self, digest: bytes, sequence: Sequence) -> bool:
        """Somebody ahead of the sequence computes the block with this hash next."""
        holder = self._frontiers.holder(digest) or self._newcomers.get(digest)
        return holder is not None and holder.order < sequence.order and holder not in self._released

    def _unheld(self, blocks: Iterable[int]) -> int:
        """How many of these nobody holds."""
        references, change = self._references, self._change
        return sum(references[block] + change.get(block, 0) <= 0 for block in blocks)

    def _hold(self, blocks: Iterable[int], change: int) -> None:
        for block in blocks:
            self._change[block] = self._change.get(block, 0) + change
