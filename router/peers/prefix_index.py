"""The blocks in one engine's prefix cache: reported in its heartbeats, or expected because of requests placed there."""

from collections import OrderedDict, deque
from collections.abc import Container, Iterator, Sequence
from itertools import islice, takewhile

from sluice.wire.heartbeats import CacheChanges
from sluice.wire.timing import CACHE_REPORT_SECONDS

Chain = tuple[int, ...]
"""Short hashes (sluice.wire.hashing) of a prompt's full blocks, in order."""

SLICE_BLOCKS = 4096
"""Blocks applied per slice of an update, which takes about a millisecond."""


class PrefixIndex:
    """The prefix cache of one engine process.

    Reports may be lost, late or repeated. A report that does not continue from `version` is ignored: the next hello
    tells the engine which changes are missing.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` limits the number of reported blocks; the least recently reported or used ones are evicted first.

        Expected blocks are limited by this router's requests that are running or ended less than CACHE_REPORT_SECONDS
        ago.
        """
        self.version = 0
        """Number of the latest change applied."""
        self._capacity = capacity
        self._reported: OrderedDict[int, None] = OrderedDict()
        self._update: Iterator[bool] | None = None
        self._expected: dict[int, int] = {}
        """By block: number of requests that expect it."""
        self._due: deque[tuple[float, Chain]] = deque()
        """Computed chains, with the time at which their expectation ends."""

    def prefix(self, chain: Chain, now: float, needed: int = 0) -> int:
        """Number of leading blocks that are cached, or will be by the time a request placed now is scheduled.

        May return 0 if there are fewer than `needed`. That takes a single look-up instead of one per block.
        """
        while self._due and self._due[0][0] <= now:
            self.drop(self._due.popleft()[1])
        if needed and not (needed <= len(chain) and self._knows(chain[needed - 1])):
            return 0
        # A chain may alternate between reported and expected blocks.
        blocks, previous = 0, -1
        while blocks > previous:
            previous = blocks
            blocks += _leading(chain, blocks, self._reported)
            blocks += _leading(chain, blocks, self._expected)
        return blocks

    def num_reported(self, chain: Chain, start: int) -> int:
        """Number of successive blocks from block `start` on that the engine has computed, according to its reports."""
        return _leading(chain, start, self._reported)

    def expect(self, chain: Chain) -> None:
        """A request was placed that will compute or reuse these blocks."""
        # Touch the root block last, so that the ends of chains are evicted first.
        for block in reversed(chain):
            self._expected[block] = self._expected.get(block, 0) + 1
            if block in self._reported:
                self._reported.move_to_end(block)

    def on_computed(self, chain: Chain, now: float) -> None:
        """The blocks of an expected chain were computed. A report will soon replace the expectation."""
        self._due.append((now + CACHE_REPORT_SECONDS, chain))

    def drop(self, chain: Chain) -> None:
        """Undo one `expect`."""
        for block in chain:
            requests = self._expected[block] - 1
            if requests:
                self._expected[block] = requests
            else:
                del self._expected[block]

    def flush(self) -> None:
        """The engine has dropped every prefix. Chains that are not computed yet remain expected."""
        self._reported.clear()
        while self._due:
            self.drop(self._due.popleft()[1])

    def begin_update(self, report: CacheChanges) -> None:
        """Start applying a report. Ignored if it does not continue from `version`, or if another update is in
        progress."""
        follows = report.whole or report.after <= self.version
        if self._update is None and follows and report.last > self.version:
            self._update = self._apply(report)

    def continue_update(self) -> bool:
        """Apply the next slice. Returns False if no update is in progress."""
        if self._update is None:
            return False
        if not next(self._update, False):
            self._update = None
        return True

    def _knows(self, block: int) -> bool:
        return block in self._reported or block in self._expected

    def _apply(self, report: CacheChanges) -> Iterator[bool]:
        # Build a whole report separately, so that the previous one is used until it is complete.
        reported: OrderedDict[int, None] = OrderedDict() if report.whole else self._reported
        for part in _slices(report.removed):
            for block in part:
                reported.pop(block, None)
            yield True
        for part in _slices(report.stored):
            for block in part:
                reported[block] = None
            while len(reported) > self._capacity:
                reported.popitem(last=False)
            yield True
        self._reported = reported
        self.version = report.last


def _leading(chain: Chain, start: int, known: Container[int]) -> int:
    # takewhile loops in C, which matters because placement calls this for every engine.
    return len(list(takewhile(known.__contains__, islice(chain, start, None))))


def _slices(blocks: Sequence[int]) -> Iterator[Sequence[int]]:
    return (blocks[at : at + SLICE_BLOCKS] for at in range(0, len(blocks), SLICE_BLOCKS))
