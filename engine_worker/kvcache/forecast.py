"""Which sequences would fit: the arithmetic of releasing, growing and admitting, without moving a block."""

from collections.abc import Iterable

from engine_worker.kvcache.pool import BlockPool, Geometry
from engine_worker.kvcache.prefix import Prefix, PrefixFinder
from engine_worker.lora.pages import AdapterPages, PagesForecast
from engine_worker.sequence import Sequence


class NextBlocks:
    """The block that each holder computes next, if all tokens of it are known: no other should compute it too."""

    def __init__(self) -> None:
        self._holders: dict[bytes, Sequence] = {}
        self._digests: dict[Sequence, bytes] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def set(self, sequence: Sequence, digest: bytes | None) -> None:
        """The sequence computes the block with this hash next; None: no full block, or it no longer holds memory."""
        before = self._digests.pop(sequence, None)
        if before is not None and self._holders.get(before) is sequence:
            del self._holders[before]
        if digest is not None:
            self._digests[sequence] = digest
            self._holders.setdefault(digest, sequence)

    def holder_of(self, digest: bytes) -> Sequence | None:
        """The sequence that computes this block next."""
        return self._holders.get(digest)


class Forecast:
    """The pool as it would be. What fits here, `KvCacheManager.allocate` can give after the same releases."""

    def __init__(
        self,
        pool: BlockPool,
        finder: PrefixFinder,
        geometry: Geometry,
        next_blocks: NextBlocks,
        adapters: AdapterPages | None = None,
    ) -> None:
        self.num_blocks = pool.num_blocks
        self.available = pool.available
        self._references = pool.references
        self._finder = finder
        self._geometry = geometry
        self._next_blocks = next_blocks
        self._adapters = None if adapters is None else PagesForecast(adapters)
        self._prefixes: dict[Sequence, Prefix] = {}
        self._change: dict[int, int] = {}
        """Of reference counts, by block."""
        self._loading: set[int] = set()
        """Host blocks that sequences admitted here will load."""
        self._newcomers: dict[bytes, Sequence] = {}
        """The sequence, of those admitted here, that computes a block next, by the block's hash."""
        self._released: set[Sequence] = set()

    def grow(self, sequence: Sequence) -> bool:
        """Allocate for what a holder may compute next; False, with no effect, if there are too few blocks."""
        if sequence.num_tokens <= sequence.num_placed or sequence.complete:
            return True
        lacking = self._geometry.table_length(sequence.num_computed, sequence.num_tokens) - len(sequence.blocks)
        if lacking > self.available:
            return False
        self.available -= max(0, lacking)
        return True

    def admit(self, sequence: Sequence, headroom: int) -> bool:
        """Allocate for a sequence without memory; False, with no effect, unless `headroom` more blocks are left, and
        pages for its adapter."""
        adapters, version = self._adapters, sequence.request.adapter
        if adapters is not None and version is not None and not adapters.fits(version):
            return False
        prefix = self._find(sequence)
        held, loading = prefix.held, [block for _, block in prefix.on_host if block not in self._loading]
        taken = self._geometry.table_length(prefix.num_computed, sequence.num_tokens) - len(prefix.blocks)
        # Within a bounded window the sequence soon replaces shared blocks by its own, so sharing saves nothing.
        taken += len(held) + len(prefix.on_host) if self._geometry.bounded else self._unheld(held) + len(loading)
        if taken + headroom > self.available:
            return False
        self.available -= taken
        if adapters is not None and version is not None:
            adapters.hold(version)
        self._hold(held, 1)
        self._loading.update(loading)
        digest = self._finder.next_block(sequence, prefix.num_computed)
        if digest is not None:
            # The first in order computes it; the others wait.
            self._newcomers.setdefault(digest, sequence)
        return True

    def awaits(self, sequence: Sequence) -> bool:
        """Whether a sequence ahead is computing the next block that this one, which holds no memory, lacks."""
        # Waiting pays off, as the block will be in the cache. It cannot deadlock, because sequences wait only for those
        # ahead of them in order that hold memory.
        if sequence.awaited is not None and self._is_ahead(sequence.awaited, sequence):
            return True
        sequence.awaited = None
        if self._next_blocks or self._newcomers:
            digest = self._finder.missing(sequence, self._find(sequence))
            if digest is not None and self._is_ahead(digest, sequence):
                sequence.awaited = digest
        return sequence.awaited is not None

    def release(self, sequence: Sequence) -> None:
        """Return the blocks of a holder that has not grown in this forecast."""
        held = sequence.blocks[sequence.first_block :]
        self._hold(held, -1)
        self.available += self._unheld(held)
        self._released.add(sequence)
        if self._adapters is not None and sequence.request.adapter is not None:
            self._adapters.release(sequence.request.adapter)

    def growth(self, sequence: Sequence, tokens: int) -> int:
        """Blocks beyond those that the sequence has or would get now, for `tokens` more tokens, up to max_tokens."""
        geometry = self._geometry
        most = geometry.max_blocks(min(sequence.num_tokens + tokens, sequence.request.max_tokens))
        if not geometry.bounded:
            return most - geometry.blocks_for(sequence.num_tokens)
        if sequence.blocks:
            # Blocks from the cache do not count as its own: when it gives them back others may still hold them.
            first, num_computed = max(sequence.first_block, sequence.num_found), sequence.num_computed
        else:
            prefix = self._find(sequence)
            first, num_computed = prefix.first_block, prefix.num_computed
        held = max(len(sequence.blocks), geometry.table_length(num_computed, sequence.num_tokens)) - first
        return max(0, most - held)

    def growth_to_end(self, sequence: Sequence) -> int:
        return self.growth(sequence, sequence.request.max_tokens)

    def blocks_to_end(self, sequence: Sequence) -> int:
        """Blocks that a sequence without memory may need in all, with nothing in the cache."""
        return self._geometry.max_blocks(sequence.request.max_tokens)

    def _find(self, sequence: Sequence) -> Prefix:
        prefix = self._prefixes.get(sequence)
        if prefix is None:
            prefix = self._prefixes[sequence] = self._finder.find(sequence)
        return prefix

    def _is_ahead(self, digest: bytes, sequence: Sequence) -> bool:
        """Whether a sequence ahead of this one computes the block with this hash next and can go on."""
        holder = self._next_blocks.holder_of(digest) or self._newcomers.get(digest)
        if holder is None or holder in self._released or holder.allowed < holder.num_tokens:
            return False
        return holder.order < sequence.order

    def _unheld(self, blocks: Iterable[int]) -> int:
        references, change = self._references, self._change
        return sum(references[block] + change.get(block, 0) <= 0 for block in blocks)

    def _hold(self, blocks: Iterable[int], change: int) -> None:
        for block in blocks:
            self._change[block] = self._change.get(block, 0) + change
