"""Looks for blocks at keepers, which hand out what the engines of other machines have computed, or what is on a disk.

All of it happens in a thread of its own, because an answer may take long. A keeper that does not answer, or whose
blocks are not what they should be, is a miss.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from engine_worker.kvcache.copies import Copies, Target
from engine_worker.request import Sequence as TokenSequence
from engine_worker.request import State
from engine_worker.step import Content

MIN_SOUGHT_TOKENS: Final = 256
"""Fewer tokens are computed: asking takes about as long."""
RATE_SECONDS: Final = 60.0
"""Time for which a measured rate of copies counts. Then a copy measures it again."""


class Keepers(Protocol):
    """The keepers that this engine may ask. Called in one thread; failures are misses."""

    own: str
    """Address of the keeper on this machine, which may have a disk."""

    def find(self, address: str, digests: list[bytes]) -> int:
        """How many of these blocks, from the first one on, the keeper has."""

    def read(self, address: str, digests: list[bytes], blocks: list[int]) -> list[int]:
        """Copy blocks to reserved blocks of this engine's file, up to the first one that is not there or not whole;
        returns their sums. Blocks without a copy are erased."""

    def drop(self) -> None:
        """Delete what the keeper on this machine has on its disk."""

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
        self._thread = ThreadPoolExecutor(1, "kv-keeper")

    def __bool__(self) -> bool:
        return bool(self._running)

    def begin(self, absent: Iterable[tuple[TokenSequence, list[Content]]], addresses: Sequence[str]) -> list[Search]:
        """Look for the blocks that each sequence lacks at these keepers, then at the one of this machine."""
        asked = list(dict.fromkeys(filter(None, (*addresses, self._keepers.own))))
        searches, sought = list[Search](), set[bytes]()
        for sequence, contents in absent:
            # Sequences of a request share the blocks of its prompt.
            wanted = [content for content in contents if content.hash not in sought]
            sought |= {content.hash for content in wanted}
            if asked and self._is_worth(len(wanted)):
                found = self._thread.submit(self._find, asked, [content.hash for content in wanted])
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
        return self._thread.submit(self._copy, keeper, targets)

    def drop(self) -> None:
        """The cache is flushed."""
        for search in self._running:
            search.dropped = True
        self._thread.submit(self._keepers.drop)

    def close(self) -> None:
        self._thread.submit(self._keepers.close)
        self._thread.shutdown(cancel_futures=False)

    def _is_worth(self, num_blocks: int) -> bool:
        """Whether copying takes less time than computing, as far as is known."""
        if num_blocks * self._tokens_per_block < MIN_SOUGHT_TOKENS:
            return False
        known = self._clock() - self._measured_at < RATE_SECONDS
        if known and 0 < self._copy_rate < self._compute_rate():
            self.slow += num_blocks
            return False
        return True

    def _find(self, addresses: list[str], digests: list[bytes]) -> Found:
        """The keeper that has most of the blocks, asked until one has all."""
        best = Found("", 0)
        for address in addresses:
            found = Found(address, self._keepers.find(address, digests))
            best = max(best, found, key=lambda each: each.num_blocks)
            if best.num_blocks == len(digests):
                break
        return best

    def _copy(self, keeper: str, targets: list[Target]) -> list[int | None]:
        begin = time.monotonic()
        digests, blocks = [content.hash for _, content in targets], [block for block, _ in targets]
        sums = self._keepers.read(keeper, digests, blocks)
        if sums:
            self._copy_rate = len(sums) * self._tokens_per_block / max(time.monotonic() - begin, 1e-9)
            self._measured_at = self._clock()
        return [*sums, *[None] * (len(targets) - len(sums))]
