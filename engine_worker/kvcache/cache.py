"""Allocates and releases the block tables of sequences."""

from collections import Counter, abc
from time import monotonic

from engine_worker.kvcache.eviction import higher, requested
from engine_worker.kvcache.fetches import Fetches, Source
from engine_worker.kvcache.forecast import Forecast, NextBlocks
from engine_worker.kvcache.keepers import KeeperSearches
from engine_worker.kvcache.pool import CacheCorruptError, Geometry
from engine_worker.kvcache.prefix import UNUSED, Prefix, PrefixFinder
from engine_worker.kvcache.saving import make_tiers
from engine_worker.lora.pages import AdapterPages
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.request import Sequence, State
from engine_worker.step import Move


class KvCacheManager:
    """Owns the block tables. A sequence with blocks is a holder: it has blocks for all its tokens or, with an attention
    window, for the tokens that the next step may compute and those that they attend to."""

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        reuse: bool = True,
        *,
        num_host_blocks: int = 0,
        window: int | None = None,
        chunk: int | None = None,
        clock: abc.Callable[[], float] = monotonic,
        event_buffer: int = 0,
        adapters: AdapterPages | None = None,
        file: PoolFile | None = None,
        source: Source | None = None,
        searches: KeeperSearches | None = None,
        guaranteed: bool = False,
    ) -> None:
        """`window`, `chunk`: see Geometry. `clock`: seconds, for retentions. `event_buffer`, `file`: see Tiers.
        `adapters`: device pages of LoRA adapters; a holder with an adapter also holds the adapter's pages. `source`:
        where to look for blocks that are not cached; None: nowhere. `searches`: see Fetches. `guaranteed`: whether
        the scheduler relies on the blocks that running requests may need until they end."""
        self.geometry = Geometry.fit(num_blocks, tokens_per_block, window, chunk)
        self.tokens_per_block = tokens_per_block
        self.tiers = make_tiers(num_blocks, num_host_blocks, clock, event_buffer, file)
        self.pool = self.tiers.device
        self.adapters = adapters
        self.holders: dict[Sequence, None] = {}
        """Sequences that hold memory."""
        self.retired: dict[Sequence, None] = {}
        """Ended sequences whose blocks an in-flight step still uses."""
        self.preempted: dict[Sequence, None] = {}
        """Sequences whose blocks were released to make room and that have no new ones yet."""
        self.preemptions = 0
        """Preemptions since the start."""
        self.prompt_tokens = 0
        """Prompt tokens of requests scheduled since the start."""
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache since the start."""
        self._finder = PrefixFinder(self.tiers, self.geometry, reuse)
        self.fetches = None
        if source is not None and reuse:
            # Otherwise copies take no blocks of the device.
            promised = self._blocks_to_end if guaranteed and self.tiers.shared is self.pool else lambda: 0
            self.fetches = Fetches(self.tiers, self._finder, source, clock, promised, searches)
        self._next_blocks = NextBlocks()
        self._clock = clock

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens found in the prefix cache since the start."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def forecast(self) -> Forecast:
        return Forecast(self.pool, self._finder, self.geometry, self._next_blocks, self.adapters)

    def allocate(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """Allocate the missing blocks of each sequence, all or none; returns the sequences that have all their
        blocks."""
        lacking = [sequence for sequence in sequences if sequence.num_tokens > sequence.num_placed]
        if not lacking:
            return list(sequences)
        # All cached prefixes are held before any block is allocated, so that no sequence evicts another's prefix.
        pinned = {sequence: self._pin(sequence) for sequence in lacking if not sequence.blocks}
        if pinned and self.adapters is not None:
            # For the same reason, their adapters become the most recently used.
            for sequence in pinned:
                if sequence.request.adapter_version is not None:
                    self.adapters.touch(sequence.request.adapter_version)
        return [
            sequence
            for sequence in sequences
            if sequence.num_tokens <= sequence.num_placed
            or (self._begin(sequence, pinned[sequence]) if sequence in pinned else self._grow(sequence))
        ]

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Let `child` hold everything that the holder `parent` has computed: full blocks are shared, a partly filled
        one is copied. False, with no effect, if there are too few blocks. The child must have these tokens and one
        more, and no blocks."""
        prefix = self._finder.fork(parent, parent.num_computed)
        for block in prefix.held:
            self.pool.hold(block)
        return self._begin(child, prefix)

    def commit(self, sequence: Sequence, count: int) -> None:
        """Record that the next `count` tokens of a holder were computed. Publishes the blocks that are now full, and
        releases those that are now before the attention window."""
        size = self.tokens_per_block
        end = sequence.num_computed = sequence.num_computed + count
        # Whether these tokens fill at least one block.
        if end % size < count:
            # Not earlier: from a block that is not fully computed another sequence would read wrong values.
            self._finder.publish(sequence, range((end - count) // size, end // size))
            self._next_blocks.set(sequence, self._finder.next_block(sequence, end))
        if self.geometry.window is not None and sequence.first_block < (first := self.geometry.first_needed(end)):
            behind = range(sequence.first_block, first)
            self._release_blocks(sequence, behind)
            # The table keeps its length, because positions map to its indexes.
            sequence.blocks[behind.start : first] = [UNUSED] * len(behind)
            sequence.first_block = first

    def keeps_drafted(self, sequence: Sequence) -> bool:
        """Whether a holder still has the blocks that the draft model's next token attends to. If the draft model is far
        behind, they may lie before the window and have been released."""
        return sequence.first_block <= self.geometry.first_needed(sequence.num_draft_computed)

    def commit_drafted(self, sequence: Sequence, end: int) -> None:
        """Record that the draft model has computed the first `end` tokens of a holder. Tokens that are not committed do
        not count."""
        start, size = sequence.num_draft_computed, self.tokens_per_block
        end = sequence.num_draft_computed = min(end, sequence.num_computed)
        for index in range(max(start // size, sequence.first_block), end // size):
            self.pool.set_drafted(sequence.blocks[index])

    def retire(self, sequence: Sequence) -> None:
        """Keep the blocks of a holder that has ended until `release`: an in-flight step uses them."""
        del self.holders[sequence]
        self.retired[sequence] = None
        self._next_blocks.set(sequence, None)

    def preempt(self, sequence: Sequence) -> None:
        """Release the blocks of a holder that will compute its tokens again."""
        self.release(sequence)
        self.preempted[sequence] = None
        self.preemptions += 1

    def release(self, sequence: Sequence) -> None:
        """Release the blocks of a sequence, if it has any, and its adapter."""
        self._release_blocks(sequence, range(sequence.first_block, len(sequence.blocks)))
        self._release_adapter(sequence)
        self._next_blocks.set(sequence, None)
        self.holders.pop(sequence, None)
        self.retired.pop(sequence, None)
        self.preempted.pop(sequence, None)
        sequence.blocks = []
        sequence.first_block = sequence.num_found = sequence.num_placed = sequence.num_computed = 0
        sequence.num_draft_computed = 0

    @property
    def copying(self) -> bool:
        """Whether device blocks are held by copies in progress, and soon available again."""
        return self.fetches is not None and self.fetches.copying and self.tiers.shared is self.pool

    def _blocks_to_end(self) -> int:
        """Additional blocks that the requests of the holders may need until they end."""
        forecast, requests = self.forecast(), {holder.request for holder in self.holders}
        for holder in self.holders:
            forecast.grow(holder)
        waiting = [s for request in requests for s in request.sequences if not s.blocks and s.state is not State.ENDED]
        later = sum(map(forecast.growth_to_end, self.holders)) + sum(map(forecast.blocks_to_end, waiting))
        return self.pool.available - forecast.available + later

    def flush(self) -> int:
        """See `Tiers.flush`."""
        if self.fetches is not None:
            self.fetches.drop()
        return self.tiers.flush()

    def undo(self, moves: abc.Iterable[Move], in_flight: abc.Iterable[Move] = ()) -> list[Sequence]:
        """Drop the content that these moves, of a failed step and all later ones, should have copied. `in_flight`: see
        `Tiers.undo`.

        Returns the holders whose computed tokens rely on that content; release them before any other call.
        """
        lost = self.tiers.undo(moves, in_flight)
        # Blocks after the computed tokens were not written yet, so they have lost nothing.
        return [
            holder
            for holder in self.holders
            if not lost.isdisjoint(holder.blocks[holder.first_block : self.geometry.blocks_for(holder.num_computed)])
        ]

    def check(self) -> None:
        """Raise CacheCorruptError unless the pools, block tables and adapter pages are consistent, and each block that
        is not full is in one table only."""
        holding = [*self.holders, *self.retired]
        tables = Counter(block for holder in holding for block in holder.blocks[holder.first_block :])
        self.tiers.check(tables, () if self.fetches is None else self.fetches.held)
        if self.adapters is not None:
            self.adapters.check(
                holder.request.adapter_version for holder in holding if holder.request.adapter_version is not None
            )
        for holder in self.holders:
            self._check_table(holder)
            for block in holder.blocks[holder.num_computed // self.tokens_per_block :]:
                if tables[block] > 1:
                    raise CacheCorruptError(f"block {block} is written by one sequence but in the tables of several")

    def _check_table(self, holder: Sequence) -> None:
        geometry = self.geometry
        size, first, computed, tokens = len(holder.blocks), holder.first_block, holder.num_computed, holder.num_tokens
        if not geometry.blocks_for(max(computed, 1)) <= size <= geometry.blocks_for(tokens):
            raise CacheCorruptError(f"{size} blocks for {computed} of {tokens} tokens")
        if first != geometry.first_needed(computed) or size - first > geometry.max_blocks(tokens):
            raise CacheCorruptError(f"blocks {first} to {size} do not fit the window at {computed} of {tokens} tokens")
        if holder.num_placed != size * self.tokens_per_block:
            raise CacheCorruptError(f"room for {holder.num_placed} tokens in {size} blocks")

    def _pin(self, sequence: Sequence) -> Prefix:
        prefix = self._finder.find(sequence)
        for block in prefix.held:
            self.pool.hold(block)
        for _, block in prefix.on_host:
            self.tiers.host.hold(block)
        return prefix

    def _unpin(self, prefix: Prefix) -> None:
        for block in reversed(prefix.held):
            self.pool.release(block)
        for _, block in reversed(prefix.on_host):
            self.tiers.host.release(block)

    def _begin(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Allocate a sequence's first blocks, or unpin its prefix and return False if there are too few."""
        length = self.geometry.table_length(prefix.num_computed, sequence.num_tokens)
        # Prefix blocks on the device are held already. Each one on the host needs a device block, unless another
        # sequence has loaded it since it was pinned.
        to_load = sum(self.pool.find(sequence.chain[index]) is None for index, _ in prefix.on_host)
        if length - len(prefix.blocks) + to_load > self.pool.available or not self._hold_adapter(sequence):
            self._unpin(prefix)
            return False
        self._load(sequence, prefix)
        sequence.blocks, sequence.first_block = prefix.blocks, prefix.first_block
        sequence.num_computed, sequence.num_found = prefix.num_computed, len(prefix.blocks)
        sequence.num_draft_computed = prefix.num_drafted
        sequence.request.begun = True
        self._extend(sequence, length)
        if prefix.copy_from is not None:
            self.tiers.copy(prefix.copy_from, sequence.blocks[sequence.num_found])
        self.preempted.pop(sequence, None)
        self.holders[sequence] = None
        self._next_blocks.set(sequence, self._finder.next_block(sequence, sequence.num_computed))
        self._count(sequence)
        return True

    def _hold_adapter(self, sequence: Sequence) -> bool:
        """Hold the pages of the sequence's adapter, if it has one; False if there are too few."""
        version = sequence.request.adapter_version
        if version is None or self.adapters is None:
            return True
        number = self.adapters.hold(version)
        sequence.adapter_slot = number or 0
        return number is not None

    def _release_adapter(self, sequence: Sequence) -> None:
        if sequence.adapter_slot and self.adapters is not None and sequence.request.adapter_version is not None:
            self.adapters.release(sequence.request.adapter_version)
            sequence.adapter_slot = 0

    def _grow(self, sequence: Sequence) -> bool:
        if sequence.complete:
            return True
        length = self.geometry.table_length(sequence.num_computed, sequence.num_tokens)
        if length - len(sequence.blocks) > self.pool.available:
            return False
        self._extend(sequence, length)
        return True

    def _extend(self, sequence: Sequence, length: int) -> None:
        new = [self.tiers.allocate() for _ in range(length - len(sequence.blocks))]
        sequence.blocks += new
        sequence.num_placed = len(sequence.blocks) * self.tokens_per_block
        sequence.request.blocks_allocated += len(new)

    def _load(self, sequence: Sequence, prefix: Prefix) -> None:
        """Load the prefix blocks that are on the host."""
        for index, source in prefix.on_host:
            block = self.pool.find(sequence.chain[index])
            if block is None:
                block = self.tiers.onload(source)
            else:
                self.pool.hold(block)
            prefix.blocks[index] = block
            self.tiers.host.release(source)

    def _count(self, sequence: Sequence) -> None:
        request = sequence.request
        request.blocks_reused += sequence.num_found - sequence.first_block
        looked_for = min(request.num_prompt // self.tokens_per_block, self._finder.usable_blocks(sequence))
        request.blocks_missed += max(0, looked_for - sequence.num_found)

    def _release_blocks(self, sequence: Sequence, indexes: range) -> None:
        if sequence.request.retention is not None:
            self._set_retention(sequence, indexes)
        blocks = sequence.blocks
        # The last block first, so that the tail of a cached prefix is evicted before its head.
        for index in reversed(indexes):
            self.pool.release(blocks[index])

    def _set_retention(self, sequence: Sequence, indexes: range) -> None:
        """Give each block the retention that the request specifies for it, or that of the next block if that is higher:
        the next block is useless without it."""
        request, now, following = sequence.request, self._clock(), None
        for index in reversed(indexes):
            block = sequence.blocks[index]
            current = self.pool.retention(block)
            if current is not None:
                position = index * self.tokens_per_block
                retention = requested(request.extras.retention, position, request.num_prompt, now) or current
                following = retention if following is None else higher(retention, following)
                self.pool.set_retention(block, following)
