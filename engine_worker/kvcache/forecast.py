"""Predicts which sequences would fit after blocks are released, grown or admitted, without changing the cache."""

from collections.abc import Iterable

from engine_worker.kvcache.pool import BlockPool, Geometry
from engine_worker.kvcache.prefix import Prefix, PrefixFinder
from engine_worker.lora.pages import AdapterPages, PagesForecast
from engine_worker.request import Sequence


class NextBlocks:
    """The block that each holder computes next, if all its tokens are known, so that no other sequence computes the
    same block."""

    def __init__(self) -> None:
        self._holders: dict[bytes, Sequence] = {}
        self._digests: dict[Sequence, bytes] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def set(self, sequence: Sequence, digest: bytes | None) -> None:
        """Set the hash of the block that the sequence computes next; None if that block will not be full, or if the
        sequence no longer holds memory."""
        previous = self._digests.pop(sequence, None)
        if previous is not None and self._holders.get(previous) is sequence:
            del self._holders[previous]
        if digest is not None:
            self._digests[sequence] = digest
            self._holders.setdefault(digest, sequence)

    def holder_of(self, digest: bytes) -> Sequence | None:
        """The sequence that computes the block with this hash next."""
        return self._holders.get(digest)


class Forecast:
    """A simulation of the block pool. What fits here, `KvCacheManager.allocate` can allocate after the same
    releases."""

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
        """Simulated changes of reference counts, by block."""
        self._loading: set[int] = set()
        """Host blocks that sequences admitted here will load."""
        self._newcomers: dict[bytes, Sequence] = {}
        """By block hash: the sequence admitted here that computes the block next."""
        self._released: set[Sequence] = set()

    def grow(self, sequence: Sequence) -> bool:
        """Allocate blocks for the tokens that a holder may compute next; False, with no effect, if there are too
        few."""
        if sequence.num_tokens <= sequence.num_placed or sequence.complete:
            return True
        lacking = self._geometry.table_length(sequence.num_computed, sequence.num_tokens) - len(sequence.blocks)
        if lacking > self.available:
            return False
        self.available -= max(0, lacking)
        return True

    def admit(self, sequence: Sequence, headroom: int) -> bool:
        """Allocate blocks, and pages for its adapter, for a sequence without memory; False, with no effect, if there
        are too few. `headroom`: blocks that must remain available."""
        adapters, version = self._adapters, sequence.request.adapter_version
        if adapters is not None and version is not None and not adapters.fits(version):
            return False
        prefix = self._find(sequence)
        held, loading = prefix.held, [block for _, block in prefix.on_host if block not in self._loading]
        needed = self._geometry.table_length(prefix.num_computed, sequence.num_tokens) - len(prefix.blocks)
        # If a window bounds its blocks, the sequence soon replaces shared blocks by others: sharing saves nothing.
        needed += len(held) + len(prefix.on_host) if self._geometry.bounded else self._unheld(held) + len(loading)
        if needed + headroom > self.available:
            return False
        self.available -= needed
        if adapters is not None and version is not None:
            adapters.hold(version)
        self._hold(held, 1)
        self._loading.update(loading)
        digest = self._finder.next_block(sequence, prefix.num_computed)
        if digest is not None:
            # The first sequence in order computes the block; the others wait for it.
            self._newcomers.setdefault(digest, sequence)
        return True

    def awaits(self, sequence: Sequence) -> bool:
        """Whether a sequence ahead of this one, which holds no memory, is computing the first block that this one
        lacks."""
        # Then it should wait, because the block will soon be cached. This cannot deadlock: sequences wait only for
        # sequences that hold memory and are ahead of them in order.
        if sequence.awaited is not None and self._is_ahead(sequence.awaited, sequence):
            return True
        sequence.awaited = None
        if self._next_blocks or self._newcomers:
            digest = self._finder.missing(sequence, self._find(sequence))
            if digest is not None and self._is_ahead(digest, sequence):
                sequence.awaited = digest
        return sequence.awaited is not None

    def release(self, sequence: Sequence) -> None:
        """Release the blocks of a holder that has not grown in this forecast."""
        held = sequence.blocks[sequence.first_block :]
        self._hold(held, -1)
        self.available += self._unheld(held)
        self._released.add(sequence)
        if self._adapters is not None and sequence.request.adapter_version is not None:
            self._adapters.release(sequence.request.adapter_version)

    def growth(self, sequence: Sequence, tokens: int) -> int:
        """Additional blocks for `tokens` more tokens, up to max_tokens: in addition to those that the sequence has or
        would be allocated now."""
        geometry = self._geometry
        max_blocks = geometry.max_blocks(min(sequence.num_tokens + tokens, sequence.request.max_tokens))
        if not geometry.bounded:
            return max_blocks - geometry.blocks_for(sequence.num_tokens)
        if sequence.blocks:
            # Without the blocks from the cache: when it releases them, others may still hold them.
            first, num_computed = max(sequence.first_block, sequence.num_found), sequence.num_computed
        else:
            prefix = self._find(sequence)
            first, num_computed = prefix.first_block, prefix.num_computed
        held = max(len(sequence.blocks), geometry.table_length(num_computed, sequence.num_tokens)) - first
        return max(0, max_blocks - held)

    def growth_to_end(self, sequence: Sequence) -> int:
        """Like `growth`, for all tokens up to max_tokens."""
        return self.growth(sequence, sequence.request.max_tokens)

    def blocks_to_end(self, sequence: Sequence) -> int:
        """All blocks that a sequence without memory may need if none of them is cached."""
        return self._geometry.max_blocks(sequence.request.max_tokens)

    def _find(self, sequence: Sequence) -> Prefix:
        prefix = self._prefixes.get(sequence)
        if prefix is None:
            prefix = self._prefixes[sequence] = self._finder.find(sequence)
        return prefix

    def _is_ahead(self, digest: bytes, sequence: Sequence) -> bool:
        """Whether a sequence ahead of this one computes the block with this hash next and is able to run."""
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
