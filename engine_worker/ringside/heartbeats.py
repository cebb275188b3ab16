"""The side lane to the routers: who listens, and a thread that sends heartbeats however long a step takes."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

import msgspec
import zmq
from structlog.stdlib import BoundLogger

from engine_worker.ringside.stats_log import Cursor, StatsLog
from sluice.ring.heartbeats import CacheNews, EngineHeartbeat, Epochs, Hello
from sluice.ring.keys import PLAIN, InsecureError, Security
from sluice.ring.lane import Lane
from sluice.ring.timing import HEARTBEAT_SECONDS, ROUTER_SILENCE_SECONDS

CONNECT_SECONDS = 0.05
"""To the next heartbeat after a lane was opened: its first one is usually refused, because it is not connected yet."""
LANE_CAPACITY = 8
MAX_ROUTERS = 256
"""Each takes a lane."""


class Greeting(NamedTuple):
    """The latest hello of a router."""

    at: float
    cache_heard: int
    incarnations: Epochs = Epochs()
    """At its address, it being the latest."""


class Listeners:
    """The routers, by address. One thread hears, others read: `heard` is replaced whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.heard: dict[str, Greeting] = {}
        self._clock = clock

    def hear(self, hello: Hello) -> bool:
        """A router wants heartbeats. False where so many do that it gets none."""
        heard = self.recent()
        if hello.address not in heard and len(heard) >= MAX_ROUTERS:
            return False
        known = heard.get(hello.address)
        incarnations = known.incarnations if known else Epochs()
        if not incarnations.is_former(hello.epoch):
            greeting = Greeting(self._clock(), hello.cache_heard, incarnations.met(hello.epoch))
            self.heard = heard | {hello.address: greeting}
        return True

    def is_new(self, hello: Hello) -> bool:
        """Whether it comes from one that took the place of a router that was heard."""
        known = self.heard.get(hello.address)
        return known is not None and known.incarnations.replaced_by(hello.epoch)

    def recent(self) -> dict[str, Greeting]:
        """Who wants heartbeats now."""
        now = self._clock()
        return {
            address: greeting for address, greeting in self.heard.items() if now - greeting.at < ROUTER_SILENCE_SECONDS
        }


class Heartbeats(threading.Thread):
    """Sends a heartbeat to every listener each HEARTBEAT_SECONDS, and one at `hurry` and `stop`."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        listeners: Listeners,
        heartbeat: Callable[[], EngineHeartbeat],
        reports: StatsLog,
        cache_news: Callable[[int], CacheNews | None],
        log: BoundLogger,
        security: Security = PLAIN,
    ) -> None:
        """`heartbeat`, and `cache_news` with what a router has heard of them, are called from this thread."""
        super().__init__(name="heartbeats", daemon=True)
        self._context = context
        self._listeners = listeners
        self._heartbeat = heartbeat
        self._log = log
        self._security = security
        self._reports = reports
        self._cache_news = cache_news
        self._lanes: dict[str, Lane] = {}
        self._read: dict[str, Cursor] = {}
        """How much of the reports each router has been told."""
        self._refused: set[str] = set()
        self._calls: SimpleQueue[bool] = SimpleQueue()
        """Whether it was the last."""

    def run(self) -> None:
        """The thread."""
        last, pause = False, HEARTBEAT_SECONDS
        while not last:
            with suppress(Empty):
                last = self._calls.get(timeout=pause)
            pause = CONNECT_SECONDS if self._send() else HEARTBEAT_SECONDS
        for lane in self._lanes.values():
            lane.close(HEARTBEAT_SECONDS)

    def hurry(self) -> None:
        """Send a heartbeat at once. Signal-safe: a SimpleQueue's `put` may interrupt itself."""
        self._calls.put(False)

    def stop(self) -> None:
        """Send a last heartbeat and end."""
        self._calls.put(True)
        self.join()

    def _send(self) -> bool:
        """To all listeners; whether a lane was opened for one of them."""
        listeners = self._listeners.recent()
        for address in self._lanes.keys() - listeners.keys():
            self._lanes.pop(address).close()
            del self._read[address]
        self._refused &= listeners.keys()
        heartbeat, known = self._heartbeat(), len(self._lanes)
        for address, greeting in listeners.items():
            lane = self._lane(address)
            if lane is None:
                continue
            news = self._reports.since(self._read[address])
            told = msgspec.structs.replace(
                heartbeat, steps=news.steps, requests=news.latest_requests, cache=self._cache_news(greeting.cache_heard)
            )
            if lane.send(told):
                self._read[address] = news.cursor
            else:
                # The next heartbeat says the same and more.
                self._log.debug("heartbeat_skipped", router=address)
        return len(self._lanes) > known

    def _lane(self, address: str) -> Lane | None:
        if address not in self._lanes and address not in self._refused:
            try:
                self._lanes[address] = Lane(self._context, address, LANE_CAPACITY, self._security)
                self._read[address] = self._reports.now()
            except (zmq.ZMQError, InsecureError) as error:
                self._refused.add(address)
                self._log.warning("bad_address", router=address, error=str(error))
        return self._lanes.get(address)
