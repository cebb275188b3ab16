"""The blocks themselves: free, held or cached, and how a full one is found again by the hash of its tokens."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple


class CacheCorruptError(RuntimeError):
    """The books do not balance: a bug in the engine, never the caller's fault."""


class Content(NamedTuple):
    """What a findable block holds."""

    hash: bytes
    tokens: tuple[int, ...]


class BlockPool:
    """Every block is one of: free; held, by as many as `references` says; or cached, held by nobody but findable.

    Cached blocks are evicted least recently used first, and only when no block is free.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._content: list[Content | None] = [None] * num_blocks
        self._found: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that can be taken: free or only cached."""
        return len(self._free) + len(self._cached)

    def take(self) -> int:
        """A block for new content, held once. Raises IndexError when none is available."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            raise IndexError("no block is available")
        self.references[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Hold a block that was found or that somebody else holds."""
        if self.references[block] == 0:
            del self._cached[block]
        self.references[block] += 1

    def release(self, block: int) -> None:
        """Hold it once less. The last holder leaves it cached if it can be found, else free."""
        left = self.references[block] = self.references[block] - 1
        if left > 0:
            return
        if left < 0:
            raise CacheCorruptError(f"block {block} was released more often than held")
        if self._content[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def publish(self, block: int, content: Content) -> None:
        """Make a held, full and computed block findable; does nothing when another with this hash already is."""
        if content.hash not in self._found and self._content[block] is None:
            self._found[content.hash] = block
            self._content[block] = content

    def find(self, content: Content) -> int | None:
        """The block with this hash, if its tokens are equal too."""
        block = self._found.get(content.hash)
        return block if block is not None and self._content[block] == content else None

    def flush(self) -> int:
        """Make nothing findable any more; returns how many cached blocks that made free."""
        freed = list(self._cached)
        self._cached.clear()
        self._free.extend(freed)
        for block in self._found.values():
            self._content[block] = None
        self._found.clear()
        return len(freed)

    def check(self, held: Mapping[int, int]) -> None:
        """Raise CacheCorruptError unless blocks are held so often, each has one state, and the index is sound."""
        for block, references in enumerate(self.references):
            if held.get(block, 0) != references:
                raise CacheCorruptError(f"block {block} is held {held.get(block, 0)} times, counted {references}")
        free, cached = self._free, self._cached
        if sorted([*free, *cached, *held]) != list(range(self.num_blocks)):
            states = f"free {len(free)} + cached {len(cached)} + held {len(held)}"
            raise CacheCorruptError(f"{states} are not the {self.num_blocks} blocks")
        for block, content in enumerate(self._content):
            if content is not None and self._found.get(content.hash) != block:
                raise CacheCorruptError(f"block {block} holds content that does not lead to it")
        if len(self._found) != sum(content is not None for content in self._content):
            raise CacheCorruptError("a hash leads to a block without content")
        if any(self._content[block] is None for block in cached) or any(self._content[block] for block in free):
            raise CacheCorruptError("a cached block has no content, or a free one has")

    def _forget(self, block: int) -> None:
        content = self._content[block]
        if content is not None:
            del self._found[content.hash]
            self._content[block] = None
