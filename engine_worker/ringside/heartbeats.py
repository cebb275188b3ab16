"""Heartbeats to the routers: the table of routers that receive them, and the thread that sends them, so that they do
not wait for a long step.

This thread owns the lanes to the routers, so it also sends the answers to their calls, and KV cache events.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import NamedTuple

import msgspec
import zmq
from structlog.stdlib import BoundLogger

from engine_worker.kvcache.events import EventLog
from engine_worker.ringside.stats_log import Cursor, StatsLog
from sluice.host.host_names import HostNames
from sluice.lanes.keys import PLAIN, Security
from sluice.lanes.lane import Lane, has_ended
from sluice.wire.adapters import AdapterChanges, AdapterLoaded, PromptAdapterRead
from sluice.wire.cache_events import CacheEvents, ReadCacheEvents
from sluice.wire.calls import CallAnswer
from sluice.wire.heartbeats import CacheChanges, EngineHeartbeat, Epochs, Hello
from sluice.wire.timing import HEARTBEAT_SECONDS, ROUTER_SILENCE_SECONDS

Answer = CallAnswer | AdapterLoaded | PromptAdapterRead
Changes = Callable[[int], AdapterChanges | None]
"""Number of the last change that a router knows -> later changes of adapters; see `AdapterRegistry.since`."""

CONNECT_SECONDS = 0.05
"""Time to the next heartbeat after a lane was opened. The first heartbeat usually fails, because the lane is not
connected yet."""
PAUSE_SECONDS = 2.0
"""If heartbeats are further apart than this, the process was paused. Only this much of a pause counts as silence of the
routers."""
LANE_CAPACITY = 8
MAX_ROUTERS = 256
"""Limit on live routers: each takes a lane."""
MAX_ANSWERS = 64
"""Limit on answers that wait for full lanes."""
MAX_READS = 256
"""Limit on reads of KV cache events that wait for the next heartbeat. A reader that receives no answer repeats its
read."""


class LastHello(NamedTuple):
    """The latest hello from a router's address."""

    at: float
    """Seconds on the clock of `RouterTable`, which stands still while this process is paused."""
    hello: Hello
    epochs: Epochs
    """Epochs of the routers at this address; the latest one sent this hello."""


class RouterTable:
    """The routers that said hello, by address. Since the heartbeat thread reads `last_hellos`, it is replaced as a
    whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.last_hellos: dict[str, LastHello] = {}
        self._clock = clock
        self._ticked = (0.0, clock())
        """(seconds without pauses until the last tick, clock time of that tick). One tuple, so that both threads read a
        consistent pair."""

    def tick(self) -> None:
        """Call with each heartbeat. While this process is paused, hellos queue up in the inbox, so that a pause is not
        silence of the routers."""
        self._ticked = (self._now(), self._clock())

    def _now(self) -> float:
        """Seconds since the start, without pauses of this process."""
        until_tick, ticked_at = self._ticked
        return until_tick + min(self._clock() - ticked_at, PAUSE_SECONDS)

    def on_hello(self, hello: Hello) -> bool:
        """Record a hello. False if there are too many routers, so that this one gets no heartbeats."""
        live = self.live()
        if hello.address not in live and len(live) >= MAX_ROUTERS:
            return False
        known = live.get(hello.address)
        epochs = known.epochs if known else Epochs()
        # A late hello from a replaced router must not overwrite its successor's.
        if not epochs.is_former(hello.epoch):
            self.last_hellos = live | {hello.address: LastHello(self._now(), hello, epochs.after(hello.epoch))}
        return True

    def is_replacement(self, hello: Hello) -> bool:
        """Whether the hello's router has replaced another one at the same address."""
        known = self.last_hellos.get(hello.address)
        return known is not None and known.epochs.replaced_by(hello.epoch)

    def live(self) -> dict[str, LastHello]:
        """The routers that have not fallen silent."""
        now = self._now()
        return {address: last for address, last in self.last_hellos.items() if now - last.at < ROUTER_SILENCE_SECONDS}


class Heartbeats(threading.Thread):
    """Sends a heartbeat to every live router each HEARTBEAT_SECONDS, and additional ones at `send_now` and `stop`."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        routers: RouterTable,
        heartbeat: Callable[[], EngineHeartbeat],
        stats_log: StatsLog,
        cache_changes: Callable[[int], CacheChanges | None],
        take_events: Callable[[], Iterable[tuple[str, CacheEvents]]],
        log: BoundLogger,
        security: Security = PLAIN,
        adapter_changes: Changes = lambda _: None,
        prompt_adapter_changes: Changes = lambda _: None,
    ) -> None:
        """cache_changes: see `Journal.since`. take_events: see `EventReads.take`. All callables are called in this
        thread."""
        super().__init__(name="heartbeats", daemon=True)
        self.routers_ended = False
        """Whether, at the latest heartbeat, the processes of all routers that said hello had ended. Other threads read
        it."""
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
        """Position in the statistics up to which each router has received them."""
        self._invalid: set[str] = set()
        """Addresses to which no lane can be opened."""
        self._answers: deque[tuple[str, Answer]] = deque(maxlen=MAX_ANSWERS)
        """(address of the router, answer); the engine's thread appends."""
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        """False: send a heartbeat now. True: send the last heartbeat and end the thread."""

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
        """Queue an answer and wake the thread. The answer is dropped if this router gets no heartbeats; if
        MAX_ANSWERS wait, the oldest one is dropped."""
        if len(self._answers) == MAX_ANSWERS:
            self._log.warning("call_answer_dropped", router=self._answers[0][0])
        self._answers.append((router, answer))
        self.send_now()

    def stop(self) -> None:
        """Send a last heartbeat, from which routers learn that this engine has drained, and join the thread."""
        self._wakeups.put(True)
        self.join()

    def _send(self) -> bool:
        """Send a heartbeat to all live routers; returns whether a lane was opened."""
        self._routers.tick()
        routers = self._routers.live()
        for address in self._lanes.keys() - routers.keys():
            self._lanes.pop(address).close()
            del self._cursors[address]
        # Forget invalid addresses of silent routers, so that an address is tried again if its router returns.
        self._invalid &= routers.keys()
        heartbeat, lanes_before = self._heartbeat(), len(self._lanes)
        for address, (_, hello, _) in routers.items():
            lane = self._lane(address)
            if lane is None:
                continue
            stats = self._stats_log.since(self._cursors[address])
            message = msgspec.structs.replace(
                heartbeat,
                steps=stats.steps,
                requests=stats.latest_requests,
                cache=self._cache_changes(hello.cache_known),
                adapters=self._adapter_changes(hello.adapters_known),
                prompt_adapters=self._prompt_adapter_changes(hello.prompt_adapters_known),
                challenge=hello.challenge,
            )
            if lane.send(message):
                self._cursors[address] = stats.cursor
            else:
                # Nothing is lost: the cursor does not move, so the next heartbeat contains the same statistics too.
                self._log.debug("heartbeat_skipped", router=address)
        # has_ended must be called for each lane at each heartbeat.
        ended = sum(map(has_ended, self._lanes.values()))
        self.routers_ended = ended == len(self._lanes)
        return len(self._lanes) > lanes_before

    def _send_answers(self) -> bool:
        """Send the queued answers; returns whether some have to wait for full lanes."""
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
            # If this fails, the router asks for the events again.
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


@dataclass(eq=False)
class EventReads:
    """Reads of KV cache events that wait for the next heartbeat. Different threads may call `put` and `take`."""

    _events: EventLog | None
    _engine: str
    _epoch: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _reads: dict[int, ReadCacheEvents] = field(default_factory=dict)
    """Latest message of each reader."""

    @property
    def enabled(self) -> bool:
        """Whether this engine keeps events for users."""
        return self._events is not None

    def put(self, message: ReadCacheEvents) -> bool:
        """Add a read. False if it will not be answered: this engine keeps no events, the message is for an earlier
        process, or too many reads wait."""
        if self._events is None or message.engine_epoch != self._epoch:
            return False
        with self._lock:
            if len(self._reads) >= MAX_READS and message.reader not in self._reads:
                return False
            self._reads[message.reader] = message
        return True

    def take(self) -> Iterator[tuple[str, CacheEvents]]:
        """Remove all waiting reads and answer them: (address of the router, answer)."""
        with self._lock:
            reads, self._reads = self._reads, {}
        if self._events is None:
            return
        for reader, read in reads.items():
            first, events = self._events.since(read.start)
            yield read.router, CacheEvents(self._engine, self._epoch, reader, read.start, first, events)
