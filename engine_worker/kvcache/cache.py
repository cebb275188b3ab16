"""Who holds which blocks: block tables, given out and taken back."""

from collections import Counter, abc
from time import monotonic

from engine_worker.kvcache.forecast import Forecast
from engine_worker.kvcache.frontier import Frontiers
from engine_worker.kvcache.geometry import Geometry
from engine_worker.kvcache.pool import CacheCorruptError
from engine_worker.kvcache.prefix import NOWHERE, Prefix, PrefixFinder
from engine_worker.kvcache.retention import highest, named
from engine_worker.kvcache.tiers import Tiers
from engine_worker.request import Sequence
from engine_worker.step import Move


class KvCache:
    """Gives sequences their blocks and takes them back.

    A sequence that holds memory has blocks for all its tokens; with an attention window for those that the next step
    may compute and those that they see.
    """

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
    ) -> None:
        """`window` and `chunk` are Geometry's; `clock` counts the seconds of retentions."""
        self.geometry = Geometry.fit(num_blocks, tokens_per_block, window, chunk)
        self.tokens_per_block = tokens_per_block
        self.tiers = Tiers(num_blocks, num_host_blocks, clock)
        self.pool = self.tiers.device
        self.holders: dict[Sequence, None] = {}
        """Sequences that hold memory."""
        self.retired: dict[Sequence, None] = {}
        """Ended ones, whose blocks a step in flight still uses."""
        self.prompt_tokens = 0
        """Of requests scheduled since the start."""
        self.cached_tokens = 0
        """Of those, served from the cache."""
        self._finder = PrefixFinder(self.tiers, self.geometry, reuse)
        self._frontiers = Frontiers()
        self._clock = clock

    @property
    def hit_ratio(self) -> float:
        """Prompt tokens served from the cache over prompt tokens, since the start."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill, the last one perhaps in part."""
        return self.geometry.blocks_for(num_tokens)

    def forecast(self) -> Forecast:
        """To try who would fit, without moving a block."""
        return Forecast(self.pool, self._finder, self.geometry, self._frontiers)

    def allocate(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """Give each of these its blocks, all or nothing for each one; returns those that have them.

        What is found in the cache is held for all of them before a new block is taken: none evicts another's prefix.
        """
        pinned = {sequence: self._pin(sequence) for sequence in sequences if not sequence.blocks}
        return [
            sequence
            for sequence in sequences
            if sequence.num_tokens <= sequence.num_placed
            or (self._begin(sequence, pinned[sequence]) if sequence in pinned else self._grow(sequence))
        ]

    def take_moves(self) -> tuple[Move, ...]:
        """What the next step has to move before it computes. If it fails, `undo` these."""
        return self.tiers.take_moves()

    def commit(self, sequence: Sequence, count: int) -> None:
        """The next `count` tokens of a holder were computed. Blocks that lie behind the window now go back."""
        start, size = sequence.num_computed, self.tokens_per_block
        end = sequence.num_computed = start + count
        if start // size < end // size:
            self._finder.publish(sequence, range(start // size, end // size))
            self._frontiers.move(sequence, self._finder.next_block(sequence, end))
        if self.geometry.window is not None and sequence.first_block < (first := self.geometry.first_needed(end)):
            behind = range(sequence.first_block, first)
            self._give_back(sequence, behind)
            sequence.blocks[behind.start : first] = [NOWHERE] * len(behind)
            sequence.first_block = first

    def retire(self, sequence: Sequence) -> None:
        """A holder has ended while a step is in flight that uses its blocks: it keeps them until it is released."""
        del self.holders[sequence]
        self.retired[sequence] = None
        self._frontiers.move(sequence, None)

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's blocks back. It may hold none."""
        self._give_back(sequence, range(sequence.first_block, len(sequence.blocks)))
        self._frontiers.move(sequence, None)
        self.holders.pop(sequence, None)
        self.retired.pop(sequence, None)
        sequence.blocks = []
        sequence.first_block = sequence.num_found = sequence.num_placed = sequence.num_computed = 0

    def undo(self, moves: abc.Iterable[Move]) -> list[Sequence]:
        """A step failed that should have made these moves: what they were to bring is forgotten.

        Returns the holders that count on it, to be released before anything else is done. Steps that were taken after
        this one fail with it: undo the moves of all of them in one call.
        """
        lost = self.tiers.undo(moves)
        if not lost:
            return []
        return [
            holder
            for holder in self.holders
            if not lost.isdisjoint(holder.blocks[holder.first_block : self.blocks_for(holder.num_computed)])
        ]

    def flush(self) -> int:
        """Forget every prefix; returns the number of blocks freed. Sequences that live keep theirs."""
        return self.tiers.flush()

    def note_prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request was scheduled for the first time, with so much of its prompt from the cache."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def check(self) -> None:
        """Raise CacheCorruptError unless the books balance and a block that is still written is in one table only."""
        holding = [*self.holders, *self.retired]
        tables = Counter(block for holder in holding for block in holder.blocks[holder.first_block :])
        self.tiers.check(tables)
        for holder in self.holders:
            self._check_table(holder)
            for block in holder.blocks[holder.num_computed // self.tokens_per_block :]:
                if tables[block] > 1:
                    raise CacheCorruptError(f"block {block} is written by one sequence and in the table of another")

    def _check_table(self, holder: Sequence) -> None:
        geometry = self.geometry
        size, first, computed, tokens = len(holder.blocks), holder.first_block, holder.num_computed, holder.num_tokens
        if not self.blocks_for(max(computed, 1)) <= size <= self.blocks_for(tokens):
            raise CacheCorruptError(f"{size} blocks for {computed} of {tokens} tokens")
        if first != geometry.first_needed(computed) or size - first > geometry.most_blocks(tokens):
            raise CacheCorruptError(f"blocks {first} to {size} of {computed} of {tokens} tokens and their window")
        if holder.num_placed != size * self.tokens_per_block:
            raise CacheCorruptError(f"places for {holder.num_placed} tokens in {size} blocks")

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
        """The first blocks of a sequence; without enough of them, let go of what was pinned for it."""
        wanted = self._wanted(sequence, prefix.num_computed)
        if wanted - len(prefix.blocks) + self._to_load(sequence, prefix) > self.pool.available:
            self._unpin(prefix)
            return False
        self._load(sequence, prefix)
        sequence.blocks, sequence.first_block = prefix.blocks, prefix.first_block
        sequence.num_computed, sequence.num_found = prefix.num_computed, len(prefix.blocks)
        sequence.request.begun = True
        self._take(sequence, wanted)
        if prefix.copy_from is not None:
            self.tiers.copy(prefix.copy_from, sequence.blocks[sequence.num_found])
        self.holders[sequence] = None
        self._frontiers.move(sequence, self._finder.next_block(sequence, sequence.num_computed))
        self._count(sequence)
        return True

    def _grow(self, sequence: Sequence) -> bool:
        if sequence.complete:
            return True
        wanted = self._wanted(sequence, sequence.num_computed)
        if wanted - len(sequence.blocks) > self.pool.available:
            return False
        self._take(sequence, wanted)
        return True

    def _wanted(self, sequence: Sequence, num_computed: int) -> int:
        return self.blocks_for(self.geometry.placed(num_computed, sequence.num_tokens))

    def _take(self, sequence: Sequence, wanted: int) -> None:
        """New blocks, until the table is so long."""
        new = [self.tiers.take() for _ in range(wanted - len(sequence.blocks))]
        sequence.blocks += new
        sequence.num_placed = len(sequence.blocks) * self.tokens_per_block
        sequence.request.blocks_allocated += len(new)

    def _to_load(self, sequence: Sequence, prefix: Prefix) -> int:
        """Blocks that are still on the host alone: another one may have had them loaded since they were pinned."""
        return sum(self.pool.find(sequence.chain[index]) is None for index, _ in prefix.on_host)

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
        """For the statistics of its request: what its prefix came to."""
        request = sequence.request
        request.blocks_reused += sequence.num_found - sequence.first_block
        looked_for = min(request.num_prompt // self.tokens_per_block, self._finder.usable_blocks(sequence.num_tokens))
        request.blocks_missed += max(0, looked_for - sequence.num_found)

    def _give_back(self, sequence: Sequence, indexes: range) -> None:
        """Hold these blocks of its table no more. The last goes first: of a cached prefix the tail is evicted first."""
        if sequence.request.retention is not None:
            self._retain(sequence, indexes)
        blocks = sequence.blocks
        for index in reversed(indexes):
            self.pool.release(blocks[index])

    def _retain(self, sequence: Sequence, indexes: range) -> None:
        """As its request asks, and each at least as eagerly as what comes after it and is no use without it."""
        request, now, rest = sequence.request, self._clock(), None
        for index in reversed(indexes):
            block = sequence.blocks[index]
            kept = self.pool.retention(block)
            if kept is not None:
                own = named(request.spec.retention, index * self.tokens_per_block, request.num_prompt, now) or kept
                rest = own if rest is None else highest(own, rest)
                self.pool.retain(block, rest)
