"""The outlets to all routers that are known."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator

import msgspec
import structlog

from detok_service.router_link import RouterLink, Sender
from detok_service.stream import Stream
from sluice.ring.heartbeats import DetokenizerHeartbeat
from sluice.ring.timing import DRAIN_NOTICE_SECONDS

MAX_LOST = 256
MAX_OUTLETS = 256
"""Each takes a lane."""


class RouterLinks:
    """Opened when a router is first named, closed when it is silent."""

    def __init__(self, open_lane: Callable[[str], Sender], detokenizer: str, log: structlog.stdlib.BoundLogger) -> None:
        """`open_lane` raises ValueError for an address that is none."""
        self.by_address: dict[str, RouterLink] = {}
        """To be looked at only."""
        self._lost: OrderedDict[str, Counter[int]] = OrderedDict()
        """`RouterLink.lost` of routers that were removed, by address; of the latest MAX_LOST."""
        self._open_lane = open_lane
        self._detokenizer = detokenizer
        self._log = log

    @property
    def waiting(self) -> int:
        """Rows that full lanes hold up."""
        # A copy, for a scrape asks from another thread.
        return sum(outlet.waiting for outlet in list(self.by_address.values()))

    def to(self, address: str, now: float) -> RouterLink | None:
        """None for an address that is none; what was to go there is lost, and said so."""
        outlet = self.by_address.get(address)
        if outlet is None:
            try:
                if len(self.by_address) >= MAX_OUTLETS:
                    raise ValueError(f"{MAX_OUTLETS} routers are known already")
                lane = self._open_lane(address)
            except ValueError as error:
                self._log.warning("bad_address", address=address, error=str(error))
                return None
            lost = self._lost.pop(address, Counter())
            outlet = self.by_address[address] = RouterLink(lane, self._detokenizer, now, lost)
        return outlet

    def greet(self, address: str, epoch: int, now: float) -> bool:
        """A router said hello; whether it took the place of another. Late hellos of that one are no news."""
        outlet = self.to(address, now)
        if outlet is None:
            return False
        outlet.heard = now
        outlet.greeted = True
        return outlet.meet(epoch)

    def greeted(self) -> Iterator[tuple[str, RouterLink]]:
        """Those who said hello, with their addresses."""
        return ((address, outlet) for address, outlet in self.by_address.items() if outlet.greeted)

    def add(self, stream: Stream) -> None:
        """A stream has a row to send."""
        self.by_address[stream.router].add(stream)

    def heartbeat(self, heartbeat: DetokenizerHeartbeat, now: float) -> None:
        """Send it to all who said hello."""
        for _, outlet in self.greeted():
            told = (
                msgspec.structs.replace(heartbeat, missed=dict(outlet.lost + Counter(heartbeat.missed)))
                if outlet.lost
                else heartbeat
            )
            if outlet.send(told) and heartbeat.draining and outlet.warned_at is None:
                outlet.warned_at = now

    def warned(self, now: float) -> bool:
        """Whether all who said hello have heard of the drain."""
        return all(
            outlet.warned_at is not None and now - outlet.warned_at >= DRAIN_NOTICE_SECONDS
            for _, outlet in self.greeted()
        )

    def forget(self, dropped: dict[int, int]) -> None:
        """What waits of these requests, up to the attempt given, is not sent."""
        for outlet in self.by_address.values():
            outlet.forget(dropped)

    def flush(self) -> None:
        """Send as much as the lanes take."""
        for outlet in self.by_address.values():
            outlet.flush()

    def silent(self, seconds: float, now: float) -> list[str]:
        """Addresses of routers that have not been heard for so long."""
        return [address for address, outlet in self.by_address.items() if now - outlet.heard > seconds]

    def remove(self, address: str, engines: Iterable[int]) -> int:
        """Close the lane to a router; the rows that are lost with it.

        Should it live after all, its heartbeats tell that something of each of these engine epochs never came.
        """
        outlet = self.by_address.pop(address)
        outlet.close()
        self._lost[address] = outlet.lost + Counter(engines)
        if len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)
        return outlet.waiting

    def close(self, linger: float) -> None:
        """Close all lanes, after at most `linger` seconds for what they still hold."""
        for outlet in self.by_address.values():
            outlet.close(linger)
