"""The blocks of one memory: free, held or cached, and how a full one is found again by the hash of its tokens."""

from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import NamedTuple

from engine_worker.kvcache.eviction import EvictionOrder
from engine_worker.kvcache.retention import STANDARD, Retention
from engine_worker.request import Content


class CacheCorruptError(RuntimeError):
    """The books do not balance: a bug in the engine, never the caller's fault."""


class Stored(NamedTuple):
    """A content, and how eagerly it is kept."""

    content: Content
    retention: Retention


class BlockPool:
    """Every block is one of: free; held, by as many as `references` says; or cached, held by nobody but findable.

    Cached blocks are evicted in the order of `EvictionOrder`, and only when no block is free.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = monotonic) -> None:
        """`clock` counts the seconds of retentions."""
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached = EvictionOrder(clock)
        self._stored: list[Stored | None] = [None] * num_blocks
        self._found: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that can be taken: free or only cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    def lowest_priority(self) -> int:
        """Of the cached block that goes first; there must be one."""
        return self._cached.lowest()

    def take(self) -> tuple[int, Stored | None]:
        """A block for new content, held once, and what was evicted for it. Raises IndexError when none is available."""
        evicted = None
        if self._free:
            block = self._free.pop()
        else:
            block = self._cached.pop()
            evicted = self._clear(block)
        self.references[block] = 1
        return block, evicted

    def hold(self, block: int) -> None:
        """Hold a block that was found or that somebody else holds."""
        if self.references[block] == 0:
            self._cached.remove(block)
        self.references[block] += 1

    def release(self, block: int) -> None:
        """Hold it once less. The last holder leaves it cached if it can be found, else free."""
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

    def publish(self, block: int, content: Content, retention: Retention = STANDARD) -> bool:
        """Make a held, full and computed block findable; False, and nothing, when another with this hash already is."""
        if content.hash in self._found or self._stored[block] is not None:
            return False
        self._found[content.hash] = block
        self._stored[block] = Stored(content, retention)
        return True

    def find(self, content: Content) -> int | None:
        """The block with this hash, if its tokens are equal too."""
        block = self._found.get(content.hash)
        if block is None:
            return None
        stored = self._stored[block]
        return block if stored is not None and stored.content.tokens == content.tokens else None

    def retention(self, block: int) -> Retention | None:
        """Of a findable block; None of another."""
        stored = self._stored[block]
        return None if stored is None else stored.retention

    def retain(self, block: int, retention: Retention) -> None:
        """Keep a held and findable block so, once nobody holds it."""
        stored = self._stored[block]
        if stored is not None:
            self._stored[block] = stored._replace(retention=retention)

    def forget(self, block: int) -> Stored | None:
        """Make a block findable no more; returns what it held, None if it was not findable anyway."""
        stored = self._clear(block)
        if stored is not None and self.references[block] == 0:
            self._cached.remove(block)
            self._free.append(block)
        return stored

    def drop(self, digest: bytes) -> bool:
        """Forget the block with this hash; False if there is none."""
        block = self._found.get(digest)
        return block is not None and self.forget(block) is not None

    def flush(self) -> int:
        """Make nothing findable any more; returns how many cached blocks that made free."""
        freed = self._cached.clear()
        self._free.extend(freed)
        for block in self._found.values():
            self._stored[block] = None
        self._found.clear()
        return len(freed)

    def contents(self) -> Iterator[tuple[int, Content]]:
        """Every findable block and what it holds."""
        return ((block, stored.content) for block, stored in enumerate(self._stored) if stored is not None)

    def check(self, held: Mapping[int, int]) -> None:
        """Raise CacheCorruptError unless blocks are held so often, each has one state, and the index is sound."""
        for block, references in enumerate(self.references):
            if held.get(block, 0) != references:
                raise CacheCorruptError(f"block {block} is held {held.get(block, 0)} times, counted {references}")
        free, cached = self._free, self._cached
        if sorted([*free, *cached, *held]) != list(range(self.num_blocks)):
            states = f"free {len(free)} + cached {len(cached)} + held {len(held)}"
            raise CacheCorruptError(f"{states} are not the {self.num_blocks} blocks")
        for block, content in self.contents():
            if self._found.get(content.hash) != block:
                raise CacheCorruptError(f"block {block} holds content that does not lead to it")
        if len(self._found) != sum(1 for _ in self.contents()):
            raise CacheCorruptError("a hash leads to a block without content")
        if any(self._stored[block] is None for block in cached) or any(self._stored[block] for block in free):
            raise CacheCorruptError("a cached block has no content, or a free one has")

    def _clear(self, block: int) -> Stored | None:
        stored = self._stored[block]
        if stored is not None:
            del self._found[stored.content.hash]
            self._stored[block] = None
        return stored
