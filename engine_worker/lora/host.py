"""Host memory for adapters: the cache, by version, and the uploads that wait for it."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from engine_worker.lora.checkpoint import AdapterWeights

MAX_REMEMBERED = 256
"""Versions that are remembered of each kind."""
RETURN_SECONDS = 5.0
"""Time in which a request that ended with ADAPTER_MISSING is expected again, after a router has sent the files."""


class HostAdapters:
    """Evicts the least recently used adapter that no live request uses."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.used = 0
        self.evictions = 0
        """Adapters dropped since the start to make room for others."""
        self._adapters: OrderedDict[str, AdapterWeights] = OrderedDict()
        self._users: Counter[str] = Counter()
        """Number of live requests by version, even if its weights are not here yet."""

    def __len__(self) -> int:
        return len(self._adapters)

    def __contains__(self, version: str) -> bool:
        return version in self._adapters

    def __getitem__(self, version: str) -> AdapterWeights:
        return self._adapters[version]

    def touch(self, version: str) -> bool:
        """Mark the adapter as just used. False: it is not here."""
        if version not in self._adapters:
            return False
        self._adapters.move_to_end(version)
        return True

    @property
    def room(self) -> int:
        """Bytes that are free or belong to adapters that no live request uses."""
        return self.num_bytes - sum(
            weights.nbytes for version, weights in self._adapters.items() if self._users[version]
        )

    def add(self, version: str, weights: AdapterWeights) -> bool:
        """Add an adapter, evicting others. False, with no effect: `room` is too small."""
        if self.touch(version):
            return True
        if weights.nbytes > self.room:
            return False
        unused = [other for other in self._adapters if not self._users[other]]
        while self.used + weights.nbytes > self.num_bytes:
            self._drop(unused.pop(0))
            self.evictions += 1
        self._adapters[version] = weights
        self.used += weights.nbytes
        return True

    def remove(self, version: str) -> bool:
        """Remove an adapter, if it is here. False, with no effect: a live request uses it."""
        if self._users[version]:
            return False
        if version in self._adapters:
            self._drop(version)
        return True

    def acquire(self, version: str) -> None:
        self._users[version] += 1

    def release(self, version: str) -> None:
        self._users[version] -= 1
        if not self._users[version]:
            del self._users[version]

    def _drop(self, version: str) -> None:
        self.used -= self._adapters.pop(version).nbytes


class WaitingUploads:
    """Uploads for which there was no room in host memory, and those whose requests are expected to be submitted again.

    The first few uploads are kept, because the engine cannot read them again. All others are dropped, since routers
    have their files. Once there is room, the requests of dropped uploads end with ADAPTER_MISSING, one at a time and in
    the order in which they wait, so that a router sends the files and submits the request again. Until that request
    arrives its adapter counts as used; otherwise the next upload might evict it.
    """

    def __init__(self, host: HostAdapters, num_kept: int, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._host = host
        self._num_kept = num_kept
        self._clock = clock
        self._kept: dict[str, AdapterWeights] = {}
        """By version."""
        self._dropped: dict[str, int] = {}
        """Sizes in bytes by version, the latest last."""
        self._requested = ""
        """The version that was last requested from a router, by ending its requests with ADAPTER_MISSING."""
        self._returning: dict[str, float] = {}
        """Versions whose requests are expected again, and until when, the latest last."""
        self._reserved: set[str] = set()
        """Versions of `_returning` that are in host memory, and count as used."""

    def __contains__(self, version: str) -> bool:
        return version in self._kept or version in self._dropped

    def add(self, version: str, weights: AdapterWeights) -> None:
        """Called if there is no room for this upload."""
        if len(self._kept) < self._num_kept:
            self._kept[version] = weights
            return
        self._dropped[version] = weights.nbytes
        while len(self._dropped) > MAX_REMEMBERED:
            del self._dropped[next(iter(self._dropped))]

    def on_stored(self, version: str) -> None:
        """Called when an upload was stored in host memory."""
        self._dropped.pop(version, None)
        if version in self._returning and version not in self._reserved:
            self._reserved.add(version)
            self._host.acquire(version)

    def on_request(self, version: str) -> None:
        """Called when a request arrives, which acquires the adapter immediately."""
        self._forget(version)

    def on_refused(self, version: str) -> None:
        """Called when a request ends with ADAPTER_MISSING."""
        self._forget(version)
        self._returning[version] = self._clock() + RETURN_SECONDS
        while len(self._returning) > MAX_REMEMBERED:
            self._forget(next(iter(self._returning)))

    def advance(self, awaited: Iterable[str]) -> None:
        """Store the kept uploads for which there is room now. Then forget the first dropped version among `awaited`,
        the versions that requests wait for, if there is room for it and no other request is expected again: its
        request then ends with ADAPTER_MISSING."""
        self._expire()
        stored = [version for version, weights in self._kept.items() if self._host.add(version, weights)]
        for version in stored:
            del self._kept[version]
            self.on_stored(version)
        if not self._dropped or self._requested in self._returning:
            return
        room = self._host.room - sum(weights.nbytes for weights in self._kept.values())
        first = next((version for version in awaited if version in self._dropped), None)
        if first is not None and self._dropped[first] <= room:
            del self._dropped[first]
            self._requested = first

    def _expire(self) -> None:
        while self._returning:
            oldest, until = next(iter(self._returning.items()))
            if self._clock() < until:
                return
            self._forget(oldest)

    def _forget(self, version: str) -> None:
        """Stop expecting its request."""
        self._returning.pop(version, None)
        if version in self._reserved:
            self._reserved.discard(version)
            self._host.release(version)
