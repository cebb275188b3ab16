"""Which sequence holds which blocks: allocates and releases block tables."""

from collections import Counter, abc
from time import monotonic

from engine_worker.kvcache.eviction import higher, requested
from engine_worker.kvcache.forecast import Forecast, NextBlocks
from engine_worker.kvcache.pool import CacheCorruptError, Geometry
from engine_worker.kvcache.prefix import UNUSED, Prefix, PrefixFinder
from engine_worker.kvcache.tiers import Tiers
from engine_worker.lora.pages import AdapterPages
from engine_worker.sequence import Sequence
from engine_worker.step import Move


class KvCacheManager:
    """A holder has blocks for all its tokens; with an attention window, for those that the next step may compute and
    those that they attend to."""

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
    ) -> None:
        """`window`, `chunk`: see Geometry. `clock`: seconds, for retentions. `event_buffer`: see Tiers. `adapters`:
        pages of LoRA adapters, of which a holder with an adapter holds its adapter's."""
        self.geometry = Geometry.fit(num_blocks, tokens_per_block, window, chunk)
        self.tokens_per_block = tokens_per_block
        self.tiers = Tiers(num_blocks, num_host_blocks, clock, event_buffer)
        self.pool = self.tiers.device
        self.adapters = adapters
        self.holders: dict[Sequence, None] = {}
        """Sequences that hold memory."""
        self.retired: dict[Sequence, None] = {}
        """Ended sequences whose blocks an in-flight step still uses."""
        self.preempted: dict[Sequence, None] = {}
        """Former holders that gave their blocks back to make room and have not got new ones."""
        self.preemptions = 0
        """Since the start."""
        self.prompt_tokens = 0
        """Of requests scheduled since the start."""
        self.cached_tokens = 0
        """Prompt tokens served from the cache since the start."""
        self._finder = PrefixFinder(self.tiers, self.geometry, reuse)
        self._next_blocks = NextBlocks()
        self._clock = clock

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens served from the cache since the start."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def forecast(self) -> Forecast:
        return Forecast(self.pool, self._finder, self.geometry, self._next_blocks, self.adapters)

    def allocate(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """Allocate the blocks of each, all or nothing; returns those that have them."""
        lacking = [sequence for sequence in sequences if sequence.num_tokens > sequence.num_placed]
        if not lacking:
            return list(sequences)
        # All cached prefixes are held before any block is allocated, so that no sequence evicts another's prefix.
        pinned = {sequence: self._pin(sequence) for sequence in lacking if not sequence.blocks}
        if pinned and self.adapters is not None:
            # The same for their adapters.
            for sequence in pinned:
                if sequence.request.adapter is not None:
                    self.adapters.touch(sequence.request.adapter)
        return [
            sequence
            for sequence in sequences
            if sequence.num_tokens <= sequence.num_placed
            or (self._begin(sequence, pinned[sequence]) if sequence in pinned else self._grow(sequence))
        ]

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Give `child` all that a holder has computed: full blocks are shared, a partial one is copied. False, with no
        effect, if there are too few blocks. The child must begin with these tokens, have one more, and hold nothing."""
        prefix = self._finder.fork(parent, parent.num_computed)
        for block in prefix.held:
            self.pool.hold(block)
        return self._begin(child, prefix)

    def commit(self, sequence: Sequence, count: int) -> None:
        """The next `count` tokens of a holder were computed. Releases blocks that are now behind the window."""
        size = self.tokens_per_block
        end = sequence.num_computed = sequence.num_computed + count
        # Whether the last of them fills a block, or lies behind one that they fill.
        if end % size < count:
            # Findable only now: until a block is full and computed, another sequence would read wrong values from it.
            self._finder.publish(sequence, range((end - count) // size, end // size))
            self._next_blocks.set(sequence, self._finder.next_block(sequence, end))
        if self.geometry.window is not None and sequence.first_block < (first := self.geometry.first_needed(end)):
            behind = range(sequence.first_block, first)
            self._release_blocks(sequence, behind)
            # The table keeps its length, so that positions still map to indexes.
            sequence.blocks[behind.start : first] = [UNUSED] * len(behind)
            sequence.first_block = first

    def keeps_drafted(self, sequence: Sequence) -> bool:
        """Whether a holder still has the blocks that its next token attends to in the draft model, which may be so far
        behind that they lie behind the window."""
        return sequence.first_block <= self.geometry.first_needed(sequence.num_draft_computed)

    def commit_drafted(self, sequence: Sequence, end: int) -> None:
        """The draft model has computed the first `end` tokens of a holder, too; those that are not committed do not
        count."""
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
        self.release(sequence)
        self.preempted[sequence] = None
        self.preemptions += 1

    def release(self, sequence: Sequence) -> None:
        """The sequence may hold no blocks."""
        self._release_blocks(sequence, range(sequence.first_block, len(sequence.blocks)))
        self._release_adapter(sequence)
        self._next_blocks.set(sequence, None)
        self.holders.pop(sequence, None)
        self.retired.pop(sequence, None)
        self.preempted.pop(sequence, None)
        sequence.blocks = []
        sequence.first_block = sequence.num_found = sequence.num_placed = sequence.num_computed = 0
        sequence.num_draft_computed = 0

    def undo(self, moves: abc.Iterable[Move]) -> list[Sequence]:
        """Forget the content that these moves, of a failed step and all later ones, should have copied.

        Returns the holders that rely on that content; they must be released before anything else is done.
        """
        lost = self.tiers.undo(moves)
        # Blocks behind the computed tokens were still to be written, so they have lost nothing.
        return [
            holder
            for holder in self.holders
            if not lost.isdisjoint(holder.blocks[holder.first_block : self.geometry.blocks_for(holder.num_computed)])
        ]

    def check(self) -> None:
        """Raise CacheCorruptError unless the books balance and each block still being written is in one table only."""
        holding = [*self.holders, *self.retired]
        tables = Counter(block for holder in holding for block in holder.blocks[holder.first_block :])
        self.tiers.check(tables)
        if self.adapters is not None:
            self.adapters.check(each.request.adapter for each in holding if each.request.adapter is not None)
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
        """Allocate a sequence's first blocks; if there are too few, unpin its prefix."""
        length = self.geometry.table_length(prefix.num_computed, sequence.num_tokens)
        # Prefix blocks on the device are held already; those on the host need a device block each, except those that
        # another sequence has loaded since they were pinned.
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
        """False if there are too few pages for its adapter."""
        version = sequence.request.adapter
        if version is None or self.adapters is None:
            return True
        number = self.adapters.hold(version)
        sequence.adapter = number or 0
        return number is not None

    def _release_adapter(self, sequence: Sequence) -> None:
        if sequence.adapter and self.adapters is not None and sequence.request.adapter is not None:
            self.adapters.release(sequence.request.adapter)
            sequence.adapter = 0

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
        # The last first, so that the tail of a cached prefix is evicted before its head.
        for index in reversed(indexes):
            self.pool.release(blocks[index])

    def _set_retention(self, sequence: Sequence, indexes: range) -> None:
        """What the request asks for each block, but at least that of the next one, which is useless without it."""
        request, now, rest = sequence.request, self._clock(), None
        for index in reversed(indexes):
            block = sequence.blocks[index]
            kept = self.pool.retention(block)
            if kept is not None:
                own = requested(request.spec.retention, index * self.tokens_per_block, request.num_prompt, now) or kept
                rest = own if rest is None else higher(own, rest)
                self.pool.set_retention(block, rest)
