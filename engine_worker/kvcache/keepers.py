"""Looks for blocks at keepers, which hand out what the engines of other machines have computed, or what is on a disk.

All of it happens in a thread of its own, because an answer may take long. A keeper that does not answer, or whose
blocks are not what they should be, is a miss.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from engine_worker.kvcache.copies import Copies, Target
from engine_worker.request import Sequence as TokenSequence
from engine_worker.request import State
from engine_worker.step import Content

MIN_SOUGHT_TOKENS: Final = 256
"""Fewer tokens are computed: asking takes about as long."""
MAX_SECONDS: Final = 10.0
"""Longest time for which a request waits until its search begins, then for the search, then for the copies."""
RATE_SECONDS: Final = 60.0
"""Time for which a measured rate of copies counts. Then a copy measures it again."""


class Keepers(Protocol):
    """The keepers that this engine may ask. Called in one thread; failures are misses."""

    own: str
    """Address of the keeper on this machine, which may have a disk."""
    failures: Mapping[str, int]
    """Calls that failed since the start, by reason."""

    def find(self, address: str, digests: list[bytes], end: float) -> int:
        """How many of these blocks, from the first one on, the keeper has. `end`: monotonic time at which to give
        up."""

    def read(self, address: str, digests: list[bytes], blocks: list[int], end: float) -> list[int]:
        """Copy blocks to reserved blocks of this engine's file, up to the first one that is not there or not whole, or
        that would arrive after `end`; returns their sums. Blocks without a copy are erased."""

    def drop(self) -> bool:
        """Delete what the keeper on this machine has on its disk. False: it did not confirm that."""

    def stop(self) -> None:
        """End the call in progress in another thread, and all later ones, as misses."""

    def close(self) -> None: ...


class Found(NamedTuple):
    """What a keeper has of the blocks that a search is for."""

    keeper: str
    num_blocks: int


@dataclass(eq=False, slots=True)
class Search:
    """For blocks that a sequence lacks, in order."""

    sequence: TokenSequence
    wanted: list[Content]
    found: "Future[Found]"
    started_at: float
    dropped: bool = False
    """Whether the cache was flushed meanwhile: what was found does not count."""
    ended: bool = False
    copies: list[Copies] = field(default_factory=list)
    """Of the blocks that were found."""

    @property
    def done(self) -> bool:
        return self.ended and all(copies.published for copies in self.copies)


class KeeperSearches:
    def __init__(
        self, keepers: Keepers, tokens_per_block: int, compute_rate: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        """`compute_rate`: prompt tokens that this engine computes per second; 0: unknown."""
        self.slow = 0
        """Blocks that were not looked for, because computing them takes less time."""
        self._keepers = keepers
        self._tokens_per_block = tokens_per_block
        self._compute_rate = compute_rate
        self._clock = clock
        self._running: list[Search] = []
        self._copy_rate = 0.0
        """Tokens per second; 0: unknown."""
        self._measured_at = -RATE_SECONDS
        self._undropped = False
        """Whether the keeper on this machine may still have blocks from before a flush."""
        self._thread = ThreadPoolExecutor(1, "kv-keeper")

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def failures(self) -> Mapping[str, int]:
        """Calls of keepers that failed since the start, by reason."""
        return self._keepers.failures

    def begin(self, absent: Iterable[tuple[TokenSequence, list[Content]]], addresses: Sequence[str]) -> list[Search]:
        """Look for the blocks that each sequence lacks at these keepers, then at the one of this machine."""
        asked = list(dict.fromkeys(filter(None, (*addresses, self._keepers.own))))
        searches, sought = list[Search](), set[bytes]()
        for sequence, contents in absent:
            # Sequences of a request share the blocks of its prompt.
            wanted = [content for content in contents if content.hash not in sought]
            sought |= {content.hash for content in wanted}
            if asked and self._is_worth(len(wanted)):
                found = self._thread.submit(self._find, asked, sequence, wanted, time.monotonic() + MAX_SECONDS)
                searches.append(Search(sequence, wanted, found, self._clock()))
        self._running += searches
        return searches

    def take_ended(self) -> list[tuple[Search, Found]]:
        """The searches that have ended since the last call and still count, with what they found."""
        ended = [search for search in self._running if search.found.done()]
        for search in ended:
            search.ended = True
            self._running.remove(search)
        return [
            (search, search.found.result())
            for search in ended
            if not search.dropped and search.sequence.state is not State.ENDED
        ]

    def copy(self, keeper: str, targets: list[Target]) -> "Future[list[int | None]]":
        """Begin to copy blocks; the result has the sum of each copy, or None if it failed."""
        return self._thread.submit(self._copy, keeper, targets, time.monotonic() + MAX_SECONDS)

    def drop(self) -> None:
        """The cache is flushed."""
        for search in self._running:
            search.dropped = True
        self._thread.submit(self._drop)

    def close(self) -> None:
        self._keepers.stop()
        self._thread.shutdown(cancel_futures=True)
        self._keepers.close()

    def _is_worth(self, num_blocks: int) -> bool:
        """Whether copying takes less time than computing, as far as is known."""
        if num_blocks * self._tokens_per_block < MIN_SOUGHT_TOKENS:
            return False
        known = self._clock() - self._measured_at < RATE_SECONDS
        if known and self._copy_rate < self._compute_rate():
            self.slow += num_blocks
            return False
        return True

    def _find(self, addresses: list[str], sequence: TokenSequence, wanted: list[Content], latest: float) -> Found:
        """The keeper that has most of the blocks, asked until one has all. `latest`: time at which it is too late to
        begin."""
        best, digests, now = Found("", 0), [content.hash for content in wanted], time.monotonic()
        if sequence.state is State.ENDED or now > latest:
            return best
        for address in addresses:
            if address == self._keepers.own and self._undropped and not self._drop():
                continue
            found = Found(address, self._keepers.find(address, digests, now + MAX_SECONDS))
            best = max(best, found, key=lambda each: each.num_blocks)
            if best.num_blocks == len(digests):
                break
        return best

    def _drop(self) -> bool:
        """Until it succeeds, the keeper is not asked for blocks."""
        self._undropped = not self._keepers.drop()
        return not self._undropped

    def _copy(self, keeper: str, targets: list[Target], latest: float) -> list[int | None]:
        """`latest`: time at which it is too late to begin: the blocks are held meanwhile."""
        begin, num_tokens, compute_rate = time.monotonic(), len(targets) * self._tokens_per_block, self._compute_rate()
        # Not for longer than computing would take.
        seconds = min(MAX_SECONDS, num_tokens / compute_rate) if compute_rate else MAX_SECONDS
        if begin > latest:
            return [None] * len(targets)
        digests, blocks = [content.hash for _, content in targets], [block for block, _ in targets]
        sums = self._keepers.read(keeper, digests, blocks, begin + seconds)
        took = max(time.monotonic() - begin, 1e-9)
        # Not of a keeper that has failed, or lost blocks meanwhile: another one may be fast.
        if len(sums) == len(targets) or took >= seconds:
            self._copy_rate = len(sums) * self._tokens_per_block / took
            self._measured_at = self._clock()
        return [*sums, *[None] * (len(targets) - len(sums))]
