"""Uploads for which there was no room in host memory, while requests wait for them."""

from collections.abc import Callable, Iterable
from contextlib import suppress

from engine_worker.lora.checkpoint import AdapterWeights
from engine_worker.lora.host import HostAdapters

MAX_DROPPED = 256
"""Of which it is remembered that there was no room."""
ASK_SECONDS = 5.0
"""For a router to send an upload once more, before the next one has its turn."""


class WaitingUploads:
    """Those that came first are kept, because they cannot be read again. The others are dropped: routers have their
    files. Once there is room, routers are asked for them, one at a time and in the order in which requests wait."""

    def __init__(self, num_kept: int, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._num_kept = num_kept
        self._clock = clock
        self._kept: dict[str, AdapterWeights] = {}
        """By version."""
        self._dropped: dict[str, int] = {}
        """Bytes by version, the latest last."""
        self._asked: tuple[str, float] | None = None
        """The version that a router is to send again, and until when others wait for that."""

    def __contains__(self, version: str) -> bool:
        return version in self._kept or version in self._dropped

    def add(self, version: str, weights: AdapterWeights) -> None:
        """There is no room for this upload."""
        if len(self._kept) < self._num_kept:
            self._kept[version] = weights
            return
        self._dropped[version] = weights.nbytes
        while len(self._dropped) > MAX_DROPPED:
            del self._dropped[next(iter(self._dropped))]

    def store(self, host: HostAdapters) -> None:
        """Those for which there is room by now."""
        self._kept = {version: weights for version, weights in self._kept.items() if not host.add(version, weights)}

    def on_read(self, version: str) -> None:
        """It came again, if it was asked for."""
        self._dropped.pop(version, None)
        if self._asked is not None and self._asked[0] == version:
            self._asked = None

    def ask_again(self, awaited: Iterable[str], room: int) -> None:
        """Forget the first of the versions that requests wait for, in order, if it is its turn: without it in this list
        the request ends with ADAPTER_MISSING, for which a router sends the files. `room`: bytes of host memory."""
        if not self._dropped or (self._asked is not None and self._clock() < self._asked[1]):
            return
        room -= sum(weights.nbytes for weights in self._kept.values())
        with suppress(StopIteration):
            first = next(version for version in awaited if version in self._dropped)
            if self._dropped[first] <= room:
                del self._dropped[first]
                self._asked = first, self._clock() + ASK_SECONDS
