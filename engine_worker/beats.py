"""The side lane to the routers: who listens, and a thread that sends beats however long a step takes."""

import threading
import time
from collections.abc import Callable

import msgspec
import zmq
from structlog.stdlib import BoundLogger

from engine_worker.reports import Cursor, Reports
from sluice.ring.lanes import Lane
from sluice.ring.wire import EngineBeat, Hello

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 30.0
"""A router that has not said hello for so long gets no more beats."""
LANE_CAPACITY = 8


class Listeners:
    """When each router last said hello, by address. One thread hears, others read: `heard` is replaced whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.heard: dict[str, float] = {}
        self._clock = clock

    def hear(self, hello: Hello) -> None:
        """A router wants beats."""
        now = self._clock()
        recent = {address: at for address, at in self.heard.items() if now - at < SILENCE_SECONDS}
        self.heard = recent | {hello.address: now}

    def addresses(self) -> set[str]:
        """Who wants beats now."""
        now = self._clock()
        return {address for address, at in self.heard.items() if now - at < SILENCE_SECONDS}


class Beats(threading.Thread):
    """Sends a beat to every listener each BEAT_SECONDS, and one at `stop`."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        listeners: Listeners,
        beat: Callable[[], EngineBeat],
        reports: Reports,
        log: BoundLogger,
    ) -> None:
        """`beat` is called from this thread."""
        super().__init__(name="beats", daemon=True)
        self._context = context
        self._listeners = listeners
        self._beat = beat
        self._log = log
        self._reports = reports
        self._lanes: dict[str, Lane] = {}
        self._read: dict[str, Cursor] = {}
        """How much of the reports each router has been told."""
        self._refused: set[str] = set()
        self._stopped = threading.Event()

    def run(self) -> None:
        """The thread."""
        while not self._stopped.wait(BEAT_SECONDS):
            self._send()
        self._send()
        for lane in self._lanes.values():
            lane.close(BEAT_SECONDS)

    def stop(self) -> None:
        """Send a last beat and end."""
        self._stopped.set()
        self.join()

    def _send(self) -> None:
        addresses = self._listeners.addresses()
        for address in self._lanes.keys() - addresses:
            self._lanes.pop(address).close()
            del self._read[address]
        self._refused &= addresses
        beat = self._beat()
        for address in addresses:
            lane = self._lane(address)
            if lane is None:
                continue
            news = self._reports.since(self._read[address])
            if lane.send(msgspec.structs.replace(beat, steps=news.steps, requests=news.requests)):
                self._read[address] = news.cursor
            else:
                # The next beat says the same and more.
                self._log.debug("beat_skipped", router=address)

    def _lane(self, address: str) -> Lane | None:
        if address not in self._lanes and address not in self._refused:
            try:
                self._lanes[address] = Lane(self._context, address, LANE_CAPACITY)
                self._read[address] = self._reports.now()
            except zmq.ZMQError as error:
                self._refused.add(address)
                self._log.warning("bad_address", router=address, error=str(error))
        return self._lanes.get(address)
