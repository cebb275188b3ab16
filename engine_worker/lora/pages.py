"""Bookkeeping of the device's adapter pages: which adapter has which pages, and which can be evicted. No tensors.

A page holds `lora_optimal_adapter_size` ranks of one linear map of one layer. An adapter gets all its pages or none. It
keeps them while a sequence that holds memory uses it, and afterwards until another adapter needs them; the least
recently used adapter is evicted first.
"""

from collections import Counter, OrderedDict, abc
from dataclasses import dataclass
from itertools import count

from engine_worker.protocol import AdapterLibrary
from engine_worker.step import AdapterLoad


class PagesCorruptError(AssertionError):
    """The bookkeeping contradicts itself: a bug."""


@dataclass(slots=True)
class _Placed:
    """An adapter that is on the device, or whose load is pending."""

    number: int
    pages: tuple[int, ...]
    holders: int = 0
    """Number of sequences that hold it."""
    taken: bool = False
    """Whether its load was part of a step. The adapter may have been copied even if that step failed."""


class AdapterPages:
    def __init__(self, host: AdapterLibrary) -> None:
        self.num_pages = host.num_pages
        self.available = host.num_pages
        """Pages that are free or belong to adapters without holders."""
        self.evictions = 0
        """Adapters evicted since the start."""
        self.host = host
        self._free = list(range(host.num_pages))
        self._placed: OrderedDict[str, _Placed] = OrderedDict()
        """By version, the least recently used first."""
        self._numbers = count(1)
        self._loads: dict[int, AdapterLoad] = {}
        """Loads that are not part of a step yet, by number."""
        self._dropped: list[int] = []
        """Numbers of evicted adapters that no step has dropped from the device yet."""

    def __contains__(self, version: str) -> bool:
        return version in self._placed

    def __len__(self) -> int:
        return len(self._placed)

    @property
    def num_free(self) -> int:
        """Pages that belong to no adapter."""
        return len(self._free)

    def holders(self, version: str) -> int:
        placed = self._placed.get(version)
        return 0 if placed is None else placed.holders

    def size(self, version: str) -> int:
        """Pages of an adapter that is on the device or in host memory."""
        placed = self._placed.get(version)
        return self.host.pages_of(version) if placed is None else len(placed.pages)

    def touch(self, version: str) -> None:
        """Mark the adapter as just used, because a sequence will hold it soon."""
        if version in self._placed:
            self._placed.move_to_end(version)

    def hold(self, version: str) -> int | None:
        """Hold the adapter for one more sequence. Returns its number in steps; None, with no effect, if too few pages
        are available."""
        placed = self._placed.get(version)
        if placed is None:
            size = self.size(version)
            if size > self.available:
                return None
            placed = self._place(version, size)
        if not placed.holders:
            self.available -= len(placed.pages)
            # A held adapter stays in host memory too, so that a failed load can be repeated.
            self.host.acquire(version)
        placed.holders += 1
        self._placed.move_to_end(version)
        return placed.number

    def release(self, version: str) -> None:
        """Release the adapter for one sequence. If it is the last one, no step in flight may read the pages."""
        placed = self._placed[version]
        placed.holders -= 1
        if placed.holders:
            return
        self.available += len(placed.pages)
        self.host.release(version)
        # Host memory may evict the adapter now, so a load that is not part of a step yet must be cancelled.
        if placed.number in self._loads:
            self._evict(version)

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """The loads that must be part of the next step."""
        if not self._loads:
            return ()
        first, *rest = self._loads.values()
        loads = (first._replace(dropped=(*first.dropped, *self._dropped)), *rest)
        for load in loads:
            self._placed[load.version].taken = True
        self._loads, self._dropped = {}, []
        return loads

    def requeue(self, loads: abc.Iterable[AdapterLoad]) -> None:
        """Repeat loads that were part of a failed step."""
        for load in loads:
            self._dropped += load.dropped
            placed = self._placed.get(load.version)
            if placed is None or placed.number != load.number:
                continue
            if placed.holders:
                self._loads[load.number] = load._replace(dropped=())
            else:
                self._evict(load.version)

    def check(self, versions: abc.Iterable[str]) -> None:
        """`versions`: the adapter of each sequence that holds memory and has an adapter. Raises PagesCorruptError."""
        held = Counter(versions)
        holders = {version: placed.holders for version, placed in self._placed.items() if placed.holders}
        if holders != dict(held):
            raise PagesCorruptError(f"adapters are held by {holders}, but used by {dict(held)}")
        pages = [*self._free, *(page for placed in self._placed.values() for page in placed.pages)]
        if sorted(pages) != list(range(self.num_pages)):
            raise PagesCorruptError("an adapter page is lost or belongs to two adapters")
        taken = sum(len(placed.pages) for placed in self._placed.values() if placed.holders)
        if self.available != self.num_pages - taken:
            raise PagesCorruptError(f"{self.available} of {self.num_pages} pages are available, {taken} are held")

    def _place(self, version: str, size: int) -> _Placed:
        while len(self._free) < size:
            self._evict(next(other for other, placed in self._placed.items() if not placed.holders))
        pages, self._free = tuple(self._free[:size]), self._free[size:]
        placed = self._placed[version] = _Placed(next(self._numbers), pages)
        self._loads[placed.number] = AdapterLoad(placed.number, version, pages)
        return placed

    def _evict(self, version: str) -> None:
        placed = self._placed.pop(version)
        self._free += placed.pages
        self.evictions += 1
        self._loads.pop(placed.number, None)
        if placed.taken:
            self._dropped.append(placed.number)


class PagesForecast:
    """Counts the pages after planned changes; see `engine_worker.kvcache.forecast.Forecast`."""

    def __init__(self, pages: AdapterPages) -> None:
        self._pages = pages
        self._available = pages.available
        self._change: Counter[str] = Counter()
        """Planned change of the number of holders, by version."""

    def fits(self, version: str) -> bool:
        return self._holders(version) > 0 or self._pages.size(version) <= self._available

    def hold(self, version: str) -> None:
        if not self._holders(version):
            self._available -= self._pages.size(version)
        self._change[version] += 1

    def release(self, version: str) -> None:
        self._change[version] -= 1
        if not self._holders(version):
            self._available += self._pages.size(version)

    def _holders(self, version: str) -> int:
        return self._pages.holders(version) + self._change[version]
