"""The blocks of one memory, device or host, and the index that finds full blocks by hash."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

from engine_worker.kvcache.eviction import DEFAULT, EvictionOrder, Retention
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.step import Content


@dataclass(frozen=True, slots=True)
class Geometry:
    """Converts numbers of tokens to numbers of blocks. Sizes are in tokens."""

    tokens_per_block: int
    window: int | None = None
    """Limit on the tokens that a token attends to, itself included; None: no limit."""
    chunk: int | None = None
    """Limit on the tokens of one sequence in a step; None: no limit, or no window."""

    @classmethod
    def fit(cls, num_blocks: int, tokens_per_block: int, window: int | None, chunk: int | None) -> "Geometry":
        """The geometry of a pool of `num_blocks`. A window that exceeds the pool is ignored; `chunk` is limited to the
        room that the window leaves."""
        if window is None:
            return cls(tokens_per_block)
        # A window that does not start at a block boundary overlaps one block more than it fills.
        room = num_blocks * tokens_per_block - tokens_per_block - (window - 1) + 1
        if room < 1:
            return cls(tokens_per_block)
        return cls(tokens_per_block, window, None if chunk is None else min(chunk, room))

    @property
    def bounded(self) -> bool:
        """Whether the number of blocks of a sequence is bounded, regardless of its length."""
        return self.chunk is not None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def first_needed(self, position: int) -> int:
        """Index of the first block that the token at `position` attends to."""
        if self.window is None or position < self.window:
            return 0
        return (position - self.window + 1) // self.tokens_per_block

    def table_length(self, num_computed: int, num_tokens: int) -> int:
        """Length of a block table before a step: for all tokens, or for those that the step can reach."""
        reached = num_tokens if self.chunk is None else min(num_tokens, num_computed + self.chunk)
        return self.blocks_for(reached)

    def max_blocks(self, num_tokens: int) -> int:
        """Limit on the blocks that a sequence holds at any time until it has `num_tokens`."""
        blocks = self.blocks_for(num_tokens)
        if self.window is None or self.chunk is None:
            return blocks
        return min(blocks, self.blocks_for(self.window - 1 + self.chunk + self.tokens_per_block - 1))

    def longest(self, num_blocks: int) -> int | None:
        """Tokens that a sequence can reach with the whole pool; None: no limit."""
        return None if self.bounded else num_blocks * self.tokens_per_block


class CacheCorruptError(RuntimeError):
    """The state of the KV cache is inconsistent: a bug of the engine."""


class Stored(NamedTuple):
    """What the index knows about a findable block."""

    content: Content
    retention: Retention
    drafted: bool = False
    """Whether the draft model has computed it, too."""

    @property
    def priority(self) -> int:
        """The current priority. The end of a phase counts once EvictionOrder has applied it."""
        return self.retention[0].priority


class Priorities(NamedTuple):
    """Priority of a block before and after a change."""

    before: int
    after: int


class BlockPool:
    """Every block is free, held (`references` counts by how many holders) or cached, which is findable but not held.

    Blocks are evicted in EvictionOrder, and only when no block is free.
    """

    def __init__(
        self,
        num_blocks: int,
        clock: Callable[[], float] = monotonic,
        on_priority: Callable[[bytes, Priorities], None] | None = None,
        file: PoolFile | None = None,
    ) -> None:
        """`clock`: seconds, for retentions. `on_priority`: called with the hash of each block whose priority
        changes. `file`: in which the blocks are; None: their memory is private."""
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        # Allocated from the end: block 0 first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached = EvictionOrder(clock, self._retain)
        self._on_priority = on_priority
        self._file = file
        self.on_held: Callable[[Stored], None] | None = None
        self.on_cached: Callable[[Stored], None] | None = None
        """Called with the content of each findable block that becomes held, or cached."""
        self._stored: list[Stored | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        """Findable blocks by hash."""

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lowest_priority(self) -> int:
        """Priority of the cached block to evict first; there must be one."""
        return self._cached.lowest()

    def allocate(self) -> tuple[int, Stored | None]:
        """(a block, held once; the content that was evicted from it, if any). Raises IndexError if none is
        available."""
        evicted = None
        if self._free:
            block = self._free.pop()
            if self._file is not None:
                self._file.reserve(block)
        else:
            block = self._cached.pop()
            evicted = self._clear(block)
        self.references[block] = 1
        return block, evicted

    def hold(self, block: int) -> None:
        """Increment the reference count of a cached or held block."""
        if self.references[block] == 0:
            self._cached.remove(block)
            if self.on_held is not None and (stored := self._stored[block]) is not None:
                self.on_held(stored)
        self.references[block] += 1

    def release(self, block: int) -> None:
        """Decrement the reference count of a held block. At 0 it is cached if it is findable, otherwise free."""
        references = self.references[block] = self.references[block] - 1
        if references > 0:
            return
        if references < 0:
            raise CacheCorruptError(f"block {block} was released more often than it was held")
        stored = self._stored[block]
        if stored is None:
            self._free.append(block)
        else:
            self._cached.add(block, stored.retention)
            if self.on_cached is not None:
                self.on_cached(stored)

    def publish(self, block: int, content: Content, retention: Retention = DEFAULT, drafted: bool = False) -> bool:
        """Make a held, full and computed block findable; False, with no effect, if another block has this hash."""
        if content.hash in self._index or self._stored[block] is not None:
            return False
        self._index[content.hash] = block
        self._stored[block] = Stored(content, retention, drafted)
        return True

    def keep(self, block: int, total: int | None = None) -> None:
        """Note in the file what a findable block contains, once all of it is there. `total`: see `PoolFile.put`."""
        stored = self._stored[block]
        if self._file is not None and stored is not None:
            self._file.put(block, stored.content, total)

    def adopt(self) -> list[Content]:
        """Take over the content of the file from its former owner; all blocks must be free. Returns what is findable
        now. Raises OSError if the content does not fit in memory."""
        contents = list[Content]()
        for block, content in () if self._file is None else self._file.adopted():
            # A content is in one block only, or the file is damaged: then later blocks with it stay free.
            if self.publish(block, content):
                self._cached.add(block, DEFAULT)
                contents.append(content)
            elif self._file is not None:
                self._file.clear(block)
        self._free = [block for block in self._free if self._stored[block] is None]
        return contents

    def find(self, content: Content) -> int | None:
        """The block with this hash and these tokens: a hash collision is a miss."""
        block = self._index.get(content.hash)
        if block is None:
            return None
        stored = self._stored[block]
        return block if stored is not None and stored.content.tokens == content.tokens else None

    def get(self, digest: bytes) -> Stored | None:
        """The index's record of the block with this hash; None: no block has it."""
        block = self._index.get(digest)
        return None if block is None else self._stored[block]

    def stored(self, block: int) -> Stored | None:
        """None if the block is not findable."""
        return self._stored[block]

    def renew(self, digest: bytes, retention: Retention) -> None:
        """Change the retention of the block with this hash, if there is one, and make it the most recently used one.
        `on_priority` is not called."""
        block = self._index.get(digest)
        if block is None or (stored := self._stored[block]) is None:
            return
        stored = self._stored[block] = stored._replace(retention=retention)
        if not self.references[block]:
            self._cached.remove(block)
            self._cached.add(block, stored.retention)

    def retention(self, block: int) -> Retention | None:
        """None if the block is not findable."""
        stored = self._stored[block]
        return None if stored is None else stored.retention

    def set_retention(self, block: int, retention: Retention) -> None:
        """Set the retention of a held block, which applies once it is cached. No effect if it is not findable."""
        self._retain(block, retention)

    def is_drafted(self, block: int) -> bool:
        """Whether the draft model has computed the block's content, too. False if the block is not findable."""
        stored = self._stored[block]
        return stored is not None and stored.drafted

    def set_drafted(self, block: int) -> None:
        """Record that the draft model has computed the block's content. No effect if it is not findable."""
        stored = self._stored[block]
        if stored is not None:
            self._stored[block] = stored._replace(drafted=True)

    def forget(self, block: int) -> Stored | None:
        """Make a block unfindable; returns its content, if it was findable."""
        stored = self._clear(block)
        if stored is not None and self.references[block] == 0:
            self._cached.remove(block)
            self._free.append(block)
        return stored

    def drop(self, digest: bytes) -> Stored | None:
        """Make the block with this hash unfindable, if there is one; returns its content."""
        block = self._index.get(digest)
        return None if block is None else self.forget(block)

    def flush(self) -> int:
        """Make all blocks unfindable; returns the number of cached blocks that became free."""
        freed = self._cached.clear()
        self._free.extend(freed)
        for block in self._index.values():
            self._stored[block] = None
        self._index.clear()
        if self._file is not None:
            self._file.clear_all()
        return len(freed)

    def contents(self) -> Iterator[tuple[int, Content]]:
        """(block, content) of every findable block."""
        return ((block, stored.content) for block, stored in enumerate(self._stored) if stored is not None)

    def hashes(self) -> list[bytes]:
        """Hashes of all findable blocks."""
        return list(self._index)

    def check(self, held: Mapping[int, int]) -> None:
        """Raise CacheCorruptError unless the reference counts are `held` (by block, without zeros), and states and
        index are consistent."""
        for block, references in enumerate(self.references):
            if held.get(block, 0) != references:
                raise CacheCorruptError(f"block {block} is held {held.get(block, 0)} times, counted {references}")
        free, cached = self._free, self._cached
        if sorted([*free, *cached, *held]) != list(range(self.num_blocks)):
            states = f"free {len(free)} + cached {len(cached)} + held {len(held)}"
            raise CacheCorruptError(f"{states} do not add up to the {self.num_blocks} blocks")
        contents = list(self.contents())
        for block, content in contents:
            if self._index.get(content.hash) != block:
                raise CacheCorruptError(f"block {block} is not in the index under its content's hash")
        if len(self._index) != len(contents):
            raise CacheCorruptError("the index names a block without content")
        if any(self._stored[block] is None for block in cached) or any(self._stored[block] for block in free):
            raise CacheCorruptError("a cached block is not findable, or a free block is")

    def _retain(self, block: int, retention: Retention) -> None:
        stored = self._stored[block]
        if stored is None:
            return
        new = self._stored[block] = stored._replace(retention=retention)
        if self._on_priority is not None and new.priority != stored.priority:
            self._on_priority(stored.content.hash, Priorities(stored.priority, new.priority))

    def _clear(self, block: int) -> Stored | None:
        stored = self._stored[block]
        if stored is not None:
            del self._index[stored.content.hash]
            self._stored[block] = None
            if self._file is not None:
                self._file.clear(block)
        return stored
