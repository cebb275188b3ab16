"""What one engine's prefix cache holds: reported by its heartbeats, or expected from our own requests."""

from collections import OrderedDict, deque
from collections.abc import Container, Iterator, Sequence
from itertools import islice, takewhile

from sluice.ring.heartbeats import CacheNews
from sluice.ring.timing import CACHE_REPORT_SECONDS

Chain = tuple[int, ...]
"""Short hashes (sluice.ring.hashing) of a prompt's full blocks, first block first."""

SLICE_BLOCKS = 4096
"""Blocks of news that are applied in one go: about a millisecond."""


class PrefixIndex:
    """One incarnation's cache.

    News may come again, late or with holes: what does not follow on from `heard` is ignored, for the next hello asks
    for it again.
    """

    def __init__(self, most_blocks: int) -> None:
        """At most so many blocks are remembered as told, those told or used last.

        What is expected is bounded by the requests placed there: live ones, and those of the last CACHE_REPORT_SECONDS.
        """
        self.heard = 0
        """Number of the latest change that was applied."""
        self._most_blocks = most_blocks
        self._told: OrderedDict[int, None] = OrderedDict()
        self._news: Iterator[bool] | None = None
        self._expected: dict[int, int] = {}
        """By how many requests."""
        self._due: deque[tuple[float, Chain]] = deque()

    @property
    def behind(self) -> bool:
        """News came that are not wholly applied."""
        return self._news is not None

    def prefix(self, chain: Chain, now: float, needed: int = 0) -> int:
        """Leading blocks of the chain that are cached, or will be before a request placed now gets there.

        Where they are fewer than `needed` it may answer 0, which takes one look-up instead of one per block.
        """
        while self._due and self._due[0][0] <= now:
            self.drop(self._due.popleft()[1])
        if needed and not (needed <= len(chain) and self._knows(chain[needed - 1])):
            return 0
        blocks, before = 0, -1
        while blocks > before:
            before = blocks
            blocks += _leading(chain, blocks, self._told)
            blocks += _leading(chain, blocks, self._expected)
        return blocks

    def expect(self, chain: Chain) -> None:
        """A request was placed that will compute these, or uses them again."""
        # The root block last: the ends of chains are forgotten first.
        for block in reversed(chain):
            self._expected[block] = self._expected.get(block, 0) + 1
            if block in self._told:
                self._told.move_to_end(block)

    def computed(self, chain: Chain, now: float) -> None:
        """That request has its first token: soon the news will tell what came of it."""
        self._due.append((now + CACHE_REPORT_SECONDS, chain))

    def drop(self, chain: Chain) -> None:
        """Nothing more is expected of that request."""
        for block in chain:
            left = self._expected[block] - 1
            if left:
                self._expected[block] = left
            else:
                del self._expected[block]

    def flush(self) -> None:
        """The engine forgot every prefix. Requests whose prompts it has not computed yet will fill it again."""
        self._told.clear()
        while self._due:
            self.drop(self._due.popleft()[1])

    def hear(self, news: CacheNews) -> None:
        """Begin to apply them, if they are news; while others are being applied they have to come again."""
        follows = news.whole or news.after <= self.heard
        if self._news is None and follows and news.last > self.heard:
            self._news = self._apply(news)

    def work(self) -> None:
        """Apply a slice of the news."""
        if self._news is not None and not next(self._news, False):
            self._news = None

    def _knows(self, block: int) -> bool:
        return block in self._told or block in self._expected

    def _apply(self, news: CacheNews) -> Iterator[bool]:
        told: OrderedDict[int, None] = OrderedDict() if news.whole else self._told
        for part in _slices(news.removed):
            for block in part:
                told.pop(block, None)
            yield True
        for part in _slices(news.stored):
            for block in part:
                told[block] = None
            while len(told) > self._most_blocks:
                told.popitem(last=False)
            yield True
        self._told = told
        self.heard = news.last


def _leading(chain: Chain, start: int, known: Container[int]) -> int:
    """How many blocks from `start` on are known, until one is not; a loop in C, for this is asked of every engine."""
    return len(list(takewhile(known.__contains__, islice(chain, start, None))))


def _slices(blocks: Sequence[int]) -> Iterator[Sequence[int]]:
    return (blocks[at : at + SLICE_BLOCKS] for at in range(0, len(blocks), SLICE_BLOCKS))
