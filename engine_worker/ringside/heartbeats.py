"""Heartbeats to the routers: which routers want them, and the thread that sends them however long a step takes.

The same thread, which owns the lanes to the routers, sends the answers to their calls, and KV cache events.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

import msgspec
import zmq
from structlog.stdlib import BoundLogger

from engine_worker.ringside.stats_log import Cursor, StatsLog
from sluice.ring.adapters import AdapterLoaded, AdapterNews
from sluice.ring.cache_events import CacheEvents
from sluice.ring.calls import CallAnswer
from sluice.ring.heartbeats import CacheNews, EngineHeartbeat, Epochs, Hello
from sluice.ring.host_names import HostNames
from sluice.ring.keys import PLAIN, Security
from sluice.ring.lane import Lane, has_ended
from sluice.ring.prompt_adapters import PromptAdapterRead
from sluice.ring.timing import HEARTBEAT_SECONDS, ROUTER_SILENCE_SECONDS

Answer = CallAnswer | AdapterLoaded | PromptAdapterRead
Changes = Callable[[int], AdapterNews | None]
"""Of adapters; see `AdapterRegistry.since`."""

CONNECT_SECONDS = 0.05
"""Until the next heartbeat after a lane was opened: the first one is usually refused, as the lane is not connected
yet."""
PAUSE_SECONDS = 2.0
"""Heartbeats that are further apart show that this process was paused. Of a pause, so much counts."""
LANE_CAPACITY = 8
MAX_ROUTERS = 256
"""Each takes a lane."""
MAX_ANSWERS = 64
"""To calls, waiting for full lanes."""


class LastHello(NamedTuple):
    at: float
    """On the clock of `RouterTable`, which stands still while this process is paused."""
    cache_known: int
    """Number of the last prefix cache change that the router knows."""
    adapters_known: int = 0
    """The same for changes of the LoRA adapters."""
    prompt_adapters_known: int = 0
    """The same for changes of the prompt adapters."""
    epochs: Epochs = Epochs()
    """Of the routers at this address; the latest sent this hello."""


class RouterTable:
    """The routers that said hello, by address. The heartbeats' thread reads it: `last_hellos` is replaced whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.last_hellos: dict[str, LastHello] = {}
        self._clock = clock
        self._ticked = (0.0, clock())
        """The seconds that had counted at the last tick, and when it was. One value, as both threads read it."""

    def tick(self) -> None:
        """To be called with each heartbeat. Hellos pile up in the inbox while this process is paused, so a pause says
        nothing about the routers."""
        self._ticked = (self._counted(), self._clock())

    def _counted(self) -> float:
        counted, at = self._ticked
        return counted + min(self._clock() - at, PAUSE_SECONDS)

    def on_hello(self, hello: Hello) -> bool:
        """False if there are too many routers for this one to get heartbeats."""
        live = self.live()
        if hello.address not in live and len(live) >= MAX_ROUTERS:
            return False
        known = live.get(hello.address)
        epochs = known.epochs if known else Epochs()
        # A late hello of a replaced router must not undo what its successor has said.
        if not epochs.is_former(hello.epoch):
            last = LastHello(
                self._counted(),
                hello.cache_known,
                hello.adapters_known,
                hello.prompt_adapters_known,
                epochs.after(hello.epoch),
            )
            self.last_hellos = live | {hello.address: last}
        return True

    def is_replacement(self, hello: Hello) -> bool:
        """Whether its router has replaced another at the same address."""
        known = self.last_hellos.get(hello.address)
        return known is not None and known.epochs.replaced_by(hello.epoch)

    def live(self) -> dict[str, LastHello]:
        """The routers that have not fallen silent."""
        now = self._counted()
        return {address: last for address, last in self.last_hellos.items() if now - last.at < ROUTER_SILENCE_SECONDS}


class Heartbeats(threading.Thread):
    """Sends a heartbeat to every live router each HEARTBEAT_SECONDS, and one at `send_now` and `stop`."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        routers: RouterTable,
        heartbeat: Callable[[], EngineHeartbeat],
        stats_log: StatsLog,
        cache_changes: Callable[[int], CacheNews | None],
        take_events: Callable[[], Iterable[tuple[str, CacheEvents]]],
        log: BoundLogger,
        security: Security = PLAIN,
        adapter_changes: Changes = lambda _: None,
        prompt_adapter_changes: Changes = lambda _: None,
    ) -> None:
        """`heartbeat`, `cache_changes` (see `Journal.since`), `take_events` (see `EventReads.take`) and the changes of
        adapters are called from this thread."""
        super().__init__(name="heartbeats", daemon=True)
        self.alone = False
        """The processes of all routers that said hello had ended at the latest heartbeat. Read by another thread."""
        self._context = context
        self._routers = routers
        self._heartbeat = heartbeat
        self._log = log
        self._security = security
        self._stats_log = stats_log
        self._cache_changes = cache_changes
        self._adapter_changes = adapter_changes
        self._prompt_adapter_changes = prompt_adapter_changes
        self._take_events = take_events
        self._lanes: dict[str, Lane] = {}
        self._host_names = HostNames()
        self._cursors: dict[str, Cursor] = {}
        """How much of the statistics each router has got."""
        self._invalid: set[str] = set()
        """Addresses to which no lane can be opened."""
        self._answers: deque[tuple[str, Answer]] = deque(maxlen=MAX_ANSWERS)
        """With the address of the router; another thread appends."""
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        """True: send a last heartbeat and end."""

    def run(self) -> None:
        last, pause = False, HEARTBEAT_SECONDS
        while not last:
            with suppress(Empty):
                last = self._wakeups.get(timeout=pause)
            opened = self._send()
            self._send_events()
            pause = CONNECT_SECONDS if self._send_answers() or opened else HEARTBEAT_SECONDS
        for lane in self._lanes.values():
            lane.close(HEARTBEAT_SECONDS)

    def send_now(self) -> None:
        """Send a heartbeat without waiting for the interval. Signal-safe: SimpleQueue.put is reentrant."""
        self._wakeups.put(False)

    def answer(self, router: str, answer: Answer) -> None:
        """Send it to a router that gets heartbeats; any other gets none."""
        if len(self._answers) == MAX_ANSWERS:
            self._log.warning("call_answer_dropped", router=self._answers[0][0])
        self._answers.append((router, answer))
        self.send_now()

    def stop(self) -> None:
        """Send a last heartbeat, with which routers learn that this engine has drained, and join the thread."""
        self._wakeups.put(True)
        self.join()

    def _send(self) -> bool:
        """To all live routers; returns whether a lane was opened."""
        self._routers.tick()
        routers = self._routers.live()
        for address in self._lanes.keys() - routers.keys():
            self._lanes.pop(address).close()
            del self._cursors[address]
        # An address is tried again if its router comes back later.
        self._invalid &= routers.keys()
        heartbeat, lanes_before = self._heartbeat(), len(self._lanes)
        for address, last_hello in routers.items():
            lane = self._lane(address)
            if lane is None:
                continue
            stats = self._stats_log.since(self._cursors[address])
            message = msgspec.structs.replace(
                heartbeat,
                steps=stats.steps,
                requests=stats.latest_requests,
                cache=self._cache_changes(last_hello.cache_known),
                adapters=self._adapter_changes(last_hello.adapters_known),
                prompt_adapters=self._prompt_adapter_changes(last_hello.prompt_adapters_known),
            )
            if lane.send(message):
                self._cursors[address] = stats.cursor
            else:
                # Nothing is lost: the cursor stays, so the next heartbeat brings the same and more.
                self._log.debug("heartbeat_skipped", router=address)
        # Each lane is asked at each heartbeat, as `has_ended` needs it.
        ended = sum(map(has_ended, self._lanes.values()))
        self.alone = ended == len(self._lanes)
        return len(self._lanes) > lanes_before

    def _send_answers(self) -> bool:
        """Returns whether some have to wait."""
        for _ in range(len(self._answers)):
            address, answer = self._answers.popleft()
            lane = self._lanes.get(address)
            if lane is None:
                self._log.warning("call_answer_dropped", router=address)
            elif not lane.send(answer):
                self._answers.append((address, answer))
        return bool(self._answers)

    def _send_events(self) -> None:
        for address, events in self._take_events():
            lane = self._lanes.get(address)
            # What is not sent is asked for again.
            if lane is None or not lane.send(events):
                self._log.debug("cache_events_skipped", router=address)

    def _lane(self, address: str) -> Lane | None:
        if address not in self._lanes and address not in self._invalid:
            try:
                lane = Lane(self._context, address, LANE_CAPACITY, self._security, watched=True, names=self._host_names)
                self._lanes[address] = lane
                self._cursors[address] = self._stats_log.cursor()
            except ValueError as error:
                self._invalid.add(address)
                self._log.warning("bad_address", router=address, error=str(error))
        return self._lanes.get(address)
