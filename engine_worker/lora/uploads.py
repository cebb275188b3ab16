"""Uploads on their way to requests: those for which there was no room, and those whose requests are to come back."""

from collections.abc import Callable, Iterable

from engine_worker.lora.checkpoint import AdapterWeights
from engine_worker.lora.host import HostAdapters

MAX_REMEMBERED = 256
"""Versions of each kind."""
RETURN_SECONDS = 5.0
"""For a request that ended with ADAPTER_MISSING to come back with its files."""


class WaitingUploads:
    """Those that came first are kept, because they cannot be read again. The others are dropped: routers have their
    files. Once there is room, routers are asked for them, one at a time and in the order in which requests wait.

    What a router sends for a request is in use until the request is here: otherwise the next upload might evict it.
    """

    def __init__(self, host: HostAdapters, num_kept: int, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._host = host
        self._num_kept = num_kept
        self._clock = clock
        self._kept: dict[str, AdapterWeights] = {}
        """By version."""
        self._dropped: dict[str, int] = {}
        """Bytes by version, the latest last."""
        self._asked = ""
        """The version that a router was asked for last, until its request is back."""
        self._returning: dict[str, float] = {}
        """Versions of requests that are to come back, and until when, the latest last."""
        self._reserved: set[str] = set()
        """Those of them that are in host memory."""

    def __contains__(self, version: str) -> bool:
        return version in self._kept or version in self._dropped

    def add(self, version: str, weights: AdapterWeights) -> None:
        """There is no room for this upload."""
        if len(self._kept) < self._num_kept:
            self._kept[version] = weights
            return
        self._dropped[version] = weights.nbytes
        while len(self._dropped) > MAX_REMEMBERED:
            del self._dropped[next(iter(self._dropped))]

    def on_stored(self, version: str) -> None:
        """An upload is in host memory."""
        self._dropped.pop(version, None)
        if version in self._returning and version not in self._reserved:
            self._reserved.add(version)
            self._host.acquire(version)

    def on_request(self, version: str) -> None:
        """A request is here that acquires it at once."""
        self._forget(version)

    def on_refused(self, version: str) -> None:
        """A request has ended with ADAPTER_MISSING."""
        self._forget(version)
        self._returning[version] = self._clock() + RETURN_SECONDS
        while len(self._returning) > MAX_REMEMBERED:
            self._forget(next(iter(self._returning)))

    def advance(self, awaited: Iterable[str]) -> None:
        """Store those for which there is room by now; then forget the first of the versions that requests wait for, in
        order, if it is its turn: its request ends with ADAPTER_MISSING, for which a router sends the files."""
        self._expire()
        for version in [each for each, weights in self._kept.items() if self._host.add(each, weights)]:
            del self._kept[version]
            self.on_stored(version)
        if not self._dropped or self._asked in self._returning:
            return
        room = self._host.room - sum(weights.nbytes for weights in self._kept.values())
        first = next((version for version in awaited if version in self._dropped), None)
        if first is not None and self._dropped[first] <= room:
            del self._dropped[first]
            self._asked = first

    def _expire(self) -> None:
        while self._returning:
            oldest, until = next(iter(self._returning.items()))
            if self._clock() < until:
                return
            self._forget(oldest)

    def _forget(self, version: str) -> None:
        """It is not to come back any more."""
        self._returning.pop(version, None)
        if version in self._reserved:
            self._reserved.discard(version)
            self._host.release(version)
