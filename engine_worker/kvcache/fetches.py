"""Copies blocks that requests need from the files of other engines, before the requests run.

A copied block is exactly a computed one: it is published, and the scheduler finds it as any cached prefix. Whatever
goes wrong with a copy is a miss: the request computes the block.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol

from engine_worker.kvcache.copies import KEEPER, MACHINE, Copies, Target
from engine_worker.kvcache.keepers import KeeperSearches, Search
from engine_worker.kvcache.prefix import PrefixFinder
from engine_worker.kvcache.tiers import Tiers
from engine_worker.request import Sequence
from engine_worker.step import Content
from sluice.telemetry.measures import Histogram

FETCH_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Histogram buckets."""
HELD_FRACTION = 0.5
"""Largest part of the free blocks that all fetches together may hold: running sequences need blocks, too."""


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


class Fetch(NamedTuple):
    """What a request waits for: copies for itself, and for other requests that need the same blocks."""

    copies: list[Copies]
    searches: Seq[Search] = ()

    @property
    def done(self) -> bool:
        return all(copies.published for copies in self.copies) and all(search.done for search in self.searches)


class Fetches:
    def __init__(
        self,
        tiers: Tiers,
        finder: PrefixFinder,
        source: Source,
        clock: Callable[[], float],
        promised: Callable[[], int],
        searches: KeeperSearches | None = None,
    ) -> None:
        """`clock`: seconds. `promised`: blocks that must remain available, because running requests may need them.
        `searches`: None: no keeper is asked."""
        self.sources = {MACHINE: 0} if searches is None else {MACHINE: 0, KEEPER: 0}
        """Blocks copied since the start, by source."""
        self.seconds = Histogram(FETCH_SECONDS)
        self._refused = {"missing": 0, "memory": 0}
        self._clock = clock
        self._tiers = tiers
        self._finder = finder
        self._source = source
        self._promised = promised
        self._searches = searches
        self._fetching: dict[bytes, Copies] = {}
        """By block hash."""
        self._reader = ThreadPoolExecutor(1, "kv-reader")

    def __bool__(self) -> bool:
        return bool(self._fetching or self._searches)

    @property
    def copying(self) -> bool:
        """Whether blocks are held that receive copies. While keepers are asked, none are."""
        return bool(self._fetching)

    @property
    def held(self) -> list[int]:
        """The shared blocks that receive copies, each held once."""
        return [target.block for copies in dict.fromkeys(self._fetching.values()) for target in copies.targets]

    @property
    def fetched(self) -> int:
        """Blocks copied since the start."""
        return sum(self.sources.values())

    @property
    def refused(self) -> dict[str, int]:
        """Blocks that were not copied: no longer there or not whole, without memory for them, or computed faster."""
        return self._refused if self._searches is None else {**self._refused, "slow": self._searches.slow}

    @property
    def keeper_failures(self) -> Mapping[str, int]:
        """Questions that keepers did not answer, by reason. Empty without keepers."""
        return {} if self._searches is None else self._searches.failures

    def begin(self, sequences: Seq[Sequence], keepers: Seq[str] = ()) -> Fetch | None:
        """Begin to copy the blocks that these sequences lack; None if there is nothing to copy. `keepers`: addresses of
        keepers that may have them."""
        if self._source.empty and self._searches is None:
            return None
        absent = {sequence: self._finder.absent(sequence) for sequence in sequences}
        present = {sequence: self._present(contents) for sequence, contents in absent.items()}
        wanted = {content.hash: content for contents in present.values() for content in contents}
        now = self._clock()
        copies = self._copy(
            sequences, wanted, lambda targets: self._reader.submit(self._copy_here, targets), MACHINE, now
        )
        searches = list[Search]()
        # Blocks after one for which there is no memory could not be used.
        if self._searches is not None and wanted.keys() <= self._fetching.keys():
            rest = ((sequence, contents[len(present[sequence]) :]) for sequence, contents in absent.items())
            searches = self._searches.begin(rest, keepers)
        return Fetch(copies, searches) if copies or searches else None

    def publish(self) -> None:
        """Make the blocks of copies that have ended findable."""
        for copies in dict.fromkeys(self._fetching.values()):
            if copies.totals.done():
                self._publish(copies, copies.totals.result())
        if self._searches:
            self._copy_found(self._searches)

    def drop(self) -> None:
        """The cache is flushed: copies in progress do not count, nor do the files of engines that have ended."""
        for copies in self._fetching.values():
            copies.dropped = True
        self._source.delete_dead()
        if self._searches is not None:
            self._searches.drop()

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        if self._searches is not None:
            self._searches.close()

    def _present(self, absent: list[Content]) -> list[Content]:
        """The first of these blocks, as many as can be copied from other engines of this machine."""
        if not (absent and self._has(absent[0].hash)):
            return []
        # Engines evict the end of a prefix first, so this searches for the end of what is there. A hole before it,
        # which is rare, is found when it is copied.
        return absent[: bisect_left(absent, True, key=lambda content: not self._has(content.hash))]

    def _has(self, digest: bytes) -> bool:
        return digest in self._fetching or self._source.has(digest)

    def _copy_found(self, searches: KeeperSearches) -> None:
        """Copy what keepers have."""
        for search, (keeper, num_blocks) in searches.take_ended():
            wanted = self._still_absent(search, num_blocks)
            copy = partial(searches.copy, keeper)
            search.copies += self._copy([search.sequence], wanted, copy, KEEPER, search.started_at)
            if not search.copies:
                self.seconds.observe(self._clock() - search.started_at)

    def _still_absent(self, search: Search, num_blocks: int) -> dict[bytes, Content]:
        """Those of the blocks found that are still of use, by hash: meanwhile another request may have computed some,
        and blocks before them may have been evicted."""
        found, wanted = {content.hash for content in search.wanted[:num_blocks]}, dict[bytes, Content]()
        for content in self._finder.absent(search.sequence):
            if content.hash in found:
                wanted[content.hash] = content
            elif content.hash not in self._fetching:
                break
        return wanted

    def _copy(
        self,
        sequences: Seq[Sequence],
        wanted: dict[bytes, Content],
        copy: "Callable[[list[Target]], Future[list[int | None]]]",
        source: str,
        started_at: float,
    ) -> list[Copies]:
        """Begin to copy these blocks, as far as there is memory; returns all copies that these sequences wait for.
        `started_at`: when they began to wait."""
        if not wanted:
            return []
        awaited = dict.fromkeys(self._fetching[digest] for digest in wanted if digest in self._fetching)
        # Not at the cost of the cached blocks before them.
        device, cached = self._tiers.device, [block for each in sequences for block in self._finder.find(each).held]
        for block in cached:
            device.hold(block)
        targets = self._hold([content for digest, content in wanted.items() if digest not in self._fetching])
        for block in reversed(cached):
            device.release(block)
        if not targets:
            return list(awaited)
        copies = Copies(targets, copy(targets), started_at, source)
        self._fetching |= {target.content.hash: copies for target in targets}
        return [copies, *awaited]

    def _hold(self, contents: list[Content]) -> list[Target]:
        if not contents:
            return []
        available, held = self._tiers.shared.available, len(self.held)
        room = max(0, min(int((available + held) * HELD_FRACTION) - held, available - self._promised()))
        blocks = self._tiers.reserve(min(room, len(contents)))
        self._refused["memory"] += len(contents) - len(blocks)
        return list(map(Target, blocks, contents))

    def _copy_here(self, targets: list[Target]) -> list[int | None]:
        return [self._source.copy(content.hash, block) for block, content in targets]

    def _publish(self, copies: Copies, totals: list[int | None]) -> None:
        self.seconds.observe(self._clock() - copies.started_at)
        copies.published = True
        for (block, content), total in zip(copies.targets, totals, strict=True):
            del self._fetching[content.hash]
            if total is None or copies.dropped:
                self._refused["missing"] += 1
            else:
                self.sources[copies.source] += 1
                self._tiers.publish_copy(block, content, total)
        # The last block first, so that the tail is evicted before the head.
        for block, _ in reversed(copies.targets):
            self._tiers.shared.release(block)
