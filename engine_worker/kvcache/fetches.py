"""Copies blocks that requests need from the files of other engines, before the requests run.

A copied block is exactly a computed one: it is published, and the scheduler finds it as any cached prefix. Whatever
goes wrong with a copy is a miss: the request computes the block.
"""

from bisect import bisect_left
from collections import abc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine_worker.kvcache.prefix import PrefixFinder
from engine_worker.kvcache.tiers import Tiers
from engine_worker.request import Sequence
from engine_worker.step import Content
from sluice.telemetry.measures import Histogram

FETCH_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Histogram buckets."""
HELD_FRACTION = 0.5
"""Largest part of the available blocks that fetches may hold: running sequences need blocks, too."""


class Source(Protocol):
    """Where blocks may be: the files of other engines on this machine."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to copy from."""

    def has(self, digest: bytes) -> bool:
        """Whether a block with this hash is there, as far as is known."""

    def copy(self, digest: bytes, block: int) -> int | None:
        """Copy the block with this hash to a reserved block; returns its sum, or None if it is not there or damaged.
        Called in the reader's thread."""

    def delete_dead(self) -> None:
        """Delete the blocks of engines that have ended."""


class Target(NamedTuple):
    """A held block that receives a copy."""

    block: int
    content: Content


@dataclass(eq=False, slots=True)
class Fetch:
    """The blocks of a request that are being copied."""

    targets: list[Target]
    copied: "Future[list[int | None]] | None"
    """The sum of each copy; None: it failed. No future: nothing is copied for this request alone."""
    awaited: "list[Fetch]"
    """Fetches of other requests that copy blocks which this request needs, too."""
    started_at: float
    dropped: bool = False
    """Whether the cache was flushed meanwhile: the copies do not count."""
    published: bool = False
    """Whether its copies have ended, and the blocks are findable."""

    @property
    def done(self) -> bool:
        return self.published and all(fetch.published for fetch in self.awaited)


class Fetches:
    def __init__(
        self,
        tiers: Tiers,
        finder: PrefixFinder,
        source: Source,
        clock: Callable[[], float],
        promised: Callable[[], int],
    ) -> None:
        """`clock`: seconds. `promised`: blocks that must remain available, because running requests may need them."""
        self.fetched = 0
        """Blocks copied since the start."""
        self.refused = {"missing": 0, "memory": 0}
        """Blocks that were not copied: no longer there or not whole, or without memory for them."""
        self.seconds = Histogram(FETCH_SECONDS)
        self._clock = clock
        self._tiers = tiers
        self._finder = finder
        self._source = source
        self._promised = promised
        self._fetching: dict[bytes, Fetch] = {}
        """By block hash."""
        self._reader = ThreadPoolExecutor(1, "kv-reader")

    def __bool__(self) -> bool:
        return bool(self._fetching)

    @property
    def held(self) -> list[int]:
        """The shared blocks that receive copies, each held once."""
        return [target.block for fetch in dict.fromkeys(self._fetching.values()) for target in fetch.targets]

    def begin(self, sequences: abc.Sequence[Sequence]) -> Fetch | None:
        """Begin to copy the blocks that these sequences lack; None if there is nothing to copy."""
        if self._source.empty:
            return None
        wanted = {content.hash: content for sequence in sequences for content in self._present(sequence)}
        if not wanted:
            return None
        awaited = dict.fromkeys(self._fetching[digest] for digest in wanted if digest in self._fetching)
        # Not at the cost of the cached blocks before them.
        device, cached = self._tiers.device, [block for each in sequences for block in self._finder.find(each).held]
        for block in cached:
            device.hold(block)
        targets = self._hold([content for digest, content in wanted.items() if digest not in self._fetching])
        for block in reversed(cached):
            device.release(block)
        if not (targets or awaited):
            return None
        copied = self._reader.submit(self._copy, targets) if targets else None
        fetch = Fetch(targets, copied, list(awaited), self._clock(), published=copied is None)
        self._fetching |= {target.content.hash: fetch for target in targets}
        return fetch

    def publish(self) -> None:
        """Make the blocks of fetches that have ended findable."""
        for fetch in dict.fromkeys(self._fetching.values()):
            if fetch.copied is not None and fetch.copied.done():
                self._publish(fetch, fetch.copied.result())

    def drop(self) -> None:
        """The cache is flushed: copies in progress do not count, nor do the files of engines that have ended."""
        for fetch in self._fetching.values():
            fetch.dropped = True
        self._source.delete_dead()

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def _present(self, sequence: Sequence) -> list[Content]:
        """The blocks that the sequence lacks and that can be copied."""
        absent = self._finder.absent(sequence)
        if not (absent and self._has(absent[0].hash)):
            return []
        # Engines evict the end of a prefix first, so this searches for the end of what is there. A hole before it,
        # which is rare, is found when it is copied.
        return absent[: bisect_left(absent, True, key=lambda content: not self._has(content.hash))]

    def _has(self, digest: bytes) -> bool:
        return digest in self._fetching or self._source.has(digest)

    def _hold(self, contents: list[Content]) -> list[Target]:
        if not contents:
            return []
        available = self._tiers.shared.available
        room = max(0, min(int(available * HELD_FRACTION), available - self._promised()))
        blocks = self._tiers.reserve(min(room, len(contents)))
        self.refused["memory"] += len(contents) - len(blocks)
        return list(map(Target, blocks, contents))

    def _copy(self, targets: list[Target]) -> list[int | None]:
        return [self._source.copy(content.hash, block) for block, content in targets]

    def _publish(self, fetch: Fetch, totals: list[int | None]) -> None:
        self.seconds.observe(self._clock() - fetch.started_at)
        fetch.published = True
        for (block, content), total in zip(fetch.targets, totals, strict=True):
            del self._fetching[content.hash]
            if total is None or fetch.dropped:
                self.refused["missing"] += 1
            else:
                self.fetched += 1
                self._tiers.publish_copy(block, content, total)
        # The last block first, so that the tail is evicted before the head.
        for block, _ in reversed(fetch.targets):
            self._tiers.shared.release(block)
