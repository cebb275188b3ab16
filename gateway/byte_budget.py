"""The memory for requests that are being received or processed: one budget for all connections, shared by peers."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self


class OverBudget(Exception):  # noqa: N818 - named for what happened
    """A request does not fit. The message says which limit it exceeds."""


@dataclass(eq=False, slots=True)
class Share:
    """The bytes of one request; freed when its `with` block ends."""

    budget: "ByteBudget"
    peer: str
    """Who pays for the bytes: a token, or the address of a client."""
    size: int = 0
    evict: Callable[[], None] | None = None
    """Makes the request end, for a request that may have to make room for others: it is still being received."""

    def add(self, size: int) -> None:
        """Raises OverBudget."""
        self.budget.add(self, size)

    def move(self, peer: str) -> None:
        """Let another peer pay. Raises OverBudget."""
        self.budget.move(self, peer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.budget.free(self)


@dataclass(slots=True)
class ByteBudget:
    """No peer may hold more than half of the bytes. If all are taken, the peer that holds most loses an upload to a
    peer that holds less."""

    limit: int
    used: int = 0
    refused: int = 0
    """Requests that did not fit or had to make room."""
    _held: Counter[str] = field(default_factory=Counter)
    """Bytes by peer."""
    _shares: dict[Share, None] = field(default_factory=dict)
    """Those that hold bytes."""

    def share(self, peer: str) -> Share:
        return Share(self, peer)

    def add(self, share: Share, size: int) -> None:
        """Raises OverBudget."""
        wanted = self._wanted(share.peer, size)
        while self.used + size > self.limit:
            victim = self._victim(wanted)
            if victim is None:
                self.refused += 1
                raise OverBudget(f"the requests of all clients exceed {self.limit} bytes together, the limit")
            self._evict(victim)
        self._give(share, size)

    def move(self, share: Share, peer: str) -> None:
        """Raises OverBudget."""
        self._wanted(peer, share.size)
        size = share.size
        self.free(share)
        share.peer = peer
        self._give(share, size)

    def free(self, share: Share) -> None:
        self._shares.pop(share, None)
        self.used -= share.size
        self._held[share.peer] -= share.size
        if not self._held[share.peer]:
            del self._held[share.peer]
        share.size = 0

    def _wanted(self, peer: str, size: int) -> int:
        """The bytes of a peer with `size` more. Raises OverBudget."""
        wanted = self._held[peer] + size
        if wanted > self.limit // 2:
            self.refused += 1
            raise OverBudget(f"the requests of this client or token exceed {self.limit // 2} bytes together, the limit")
        return wanted

    def _give(self, share: Share, size: int) -> None:
        self._shares[share] = None
        self.used += size
        self._held[share.peer] += size
        share.size += size

    def _victim(self, wanted: int) -> Share | None:
        """The largest upload of the peer that holds most, if that is more than `wanted`."""
        uploads = (share for share in self._shares if share.evict is not None)
        largest = max(uploads, key=lambda share: (self._held[share.peer], share.size), default=None)
        return largest if largest is not None and self._held[largest.peer] > wanted else None

    def _evict(self, share: Share) -> None:
        self.refused += 1
        self.free(share)
        evict, share.evict = share.evict, None
        if evict is not None:
            evict()
