"""The cache of adapters in host memory, by version: evicts the least recently used adapter that no live request
uses."""

from collections import Counter, OrderedDict

from engine_worker.lora.checkpoint import AdapterWeights


class HostAdapters:
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

    @property
    def versions(self) -> list[str]:
        """The least recently used first."""
        return list(self._adapters)

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
