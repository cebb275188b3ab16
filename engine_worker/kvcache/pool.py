"""The blocks of one memory: free, held or cached, and the index that finds full ones by the hash of their tokens."""

from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import NamedTuple

from engine_worker.kvcache.eviction import DEFAULT, EvictionOrder, Retention
from engine_worker.request import Content


class CacheCorruptError(RuntimeError):
    """The books do not balance: a bug in the engine."""


class Stored(NamedTuple):
    """What a findable block holds."""

    content: Content
    retention: Retention


class BlockPool:
    """Every block is free, held (`references` counts how often) or cached: not held but findable.

    Cached blocks are evicted in EvictionOrder, only when no block is free.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = monotonic) -> None:
        """`clock`: seconds, for retentions."""
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        # Allocated from the end: block 0 first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached = EvictionOrder(clock)
        self._stored: list[Stored | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        """Findable blocks by hash."""

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Free blocks, without cached ones."""
        return len(self._free)

    def lowest_priority(self) -> int:
        """Of the cached block to evict first; there must be one."""
        return self._cached.lowest()

    def allocate(self) -> tuple[int, Stored | None]:
        """(a block held once, what was evicted for it). Raises IndexError if none is available."""
        evicted = None
        if self._free:
            block = self._free.pop()
        else:
            block = self._cached.pop()
            evicted = self._clear(block)
        self.references[block] = 1
        return block, evicted

    def hold(self, block: int) -> None:
        """Hold a cached or held block once more."""
        if self.references[block] == 0:
            self._cached.remove(block)
        self.references[block] += 1

    def release(self, block: int) -> None:
        """Hold it once less. After the last release it is cached if findable, else free."""
        left = self.references[block] = self.references[block] - 1
        if left > 0:
            return
        if left < 0:
            raise CacheCorruptError(f"block {block} was released more often than held")
        stored = self._stored[block]
        if stored is None:
            self._free.append(block)
        else:
            self._cached.add(block, stored.retention)

    def publish(self, block: int, content: Content, retention: Retention = DEFAULT) -> bool:
        """Make a held, full and computed block findable; False, with no effect, if another one has this hash."""
        if content.hash in self._index or self._stored[block] is not None:
            return False
        self._index[content.hash] = block
        self._stored[block] = Stored(content, retention)
        return True

    def find(self, content: Content) -> int | None:
        """The block with this hash and these tokens: a hash collision is a miss."""
        block = self._index.get(content.hash)
        if block is None:
            return None
        stored = self._stored[block]
        return block if stored is not None and stored.content.tokens == content.tokens else None

    def retention(self, block: int) -> Retention | None:
        """None if the block is not findable."""
        stored = self._stored[block]
        return None if stored is None else stored.retention

    def set_retention(self, block: int, retention: Retention) -> None:
        """For a held block, once it is cached. No effect on a block that is not findable."""
        stored = self._stored[block]
        if stored is not None:
            self._stored[block] = stored._replace(retention=retention)

    def forget(self, block: int) -> Stored | None:
        """Make a block unfindable; returns what it held, None if it was not findable."""
        stored = self._clear(block)
        if stored is not None and self.references[block] == 0:
            self._cached.remove(block)
            self._free.append(block)
        return stored

    def drop(self, digest: bytes) -> bool:
        """Forget the block with this hash; False if there is none."""
        block = self._index.get(digest)
        return block is not None and self.forget(block) is not None

    def flush(self) -> int:
        """Make all blocks unfindable; returns the number of cached blocks that became free."""
        freed = self._cached.clear()
        self._free.extend(freed)
        for block in self._index.values():
            self._stored[block] = None
        self._index.clear()
        return len(freed)

    def contents(self) -> Iterator[tuple[int, Content]]:
        """(block, content) of every findable block."""
        return ((block, stored.content) for block, stored in enumerate(self._stored) if stored is not None)

    def check(self, held: Mapping[int, int]) -> None:
        """Raise CacheCorruptError unless reference counts are as `held` says, each block has one state, and the index
        is consistent."""
        for block, references in enumerate(self.references):
            if held.get(block, 0) != references:
                raise CacheCorruptError(f"block {block} is held {held.get(block, 0)} times, counted {references}")
        free, cached = self._free, self._cached
        if sorted([*free, *cached, *held]) != list(range(self.num_blocks)):
            states = f"free {len(free)} + cached {len(cached)} + held {len(held)}"
            raise CacheCorruptError(f"{states} do not add up to the {self.num_blocks} blocks")
        for block, content in self.contents():
            if self._index.get(content.hash) != block:
                raise CacheCorruptError(f"block {block} is not in the index under its content's hash")
        if len(self._index) != sum(1 for _ in self.contents()):
            raise CacheCorruptError("the index names a block without content")
        if any(self._stored[block] is None for block in cached) or any(self._stored[block] for block in free):
            raise CacheCorruptError("a cached block has no content, or a free block has some")

    def _clear(self, block: int) -> Stored | None:
        stored = self._stored[block]
        if stored is not None:
            del self._index[stored.content.hash]
            self._stored[block] = None
        return stored
