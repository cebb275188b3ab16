"""The one thread that starts services, hears of their ends, and starts them again."""

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from sluice.launch.backoff import Backoff
from sluice.launch.child import Child
from sluice.launch.events import ended, on_gpus, serves_again
from sluice.launch.folder import Folder
from sluice.launch.logs import LogLine, Observe, ignore
from sluice.launch.plan import Plan, Service
from sluice.launch.slot import Slot
from sluice.telemetry.progress_beacon import PULSE_VARIABLE

TICK_SECONDS = 0.05
LOOK_SECONDS = 1.0
"""Between two looks at the pulses."""
KILL_AFTER_SECONDS = 5.0
"""A child that has not ended this long after its drain timeout is killed."""
READY, HEARD, LOST = "ready", "peer_joined", "peer_lost"
"""Events in the log that tell how far a service is."""


class RingError(RuntimeError):
    """A ring or a service could not start. `tail` holds the last log lines of the child at fault, if one is."""

    def __init__(self, message: str, tail: Sequence[str] = ()) -> None:
        self.tail = tuple(tail)
        super().__init__("\n".join([message, *self.tail]))
        self.message = message


class Supervisor(threading.Thread):
    """Owner of all seats. Children die with the thread that starts them: this one lives until `close`.

    Before everything has served once, nothing is started again: who cannot start says so.
    """

    def __init__(
        self, services: Sequence[Service], plan: Plan, folder: Folder, environment: Mapping[str, str], observe: Observe
    ) -> None:
        super().__init__(name="ring", daemon=True)
        self.seats = {
            each.name: Slot(each, folder.path / f"{each.name}.pulse", Backoff(plan.max_failed_starts))
            for each in services
        }
        self.up = threading.Event()
        """Everything has served."""
        self.failure: OSError | RingError | None = None
        """Why it could not start."""
        self._freeze_timeout = plan.freeze_timeout
        self._folder = folder
        self._environment = environment
        self._observe = observe
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._starting = threading.Lock()
        self._halted = False
        self._closed = False
        self._looked_at = time.monotonic()

    def run(self) -> None:
        """The thread."""
        for seat in self.seats.values():
            if seat.service.gpus is not None:
                self._show(on_gpus(seat.name, seat.service.gpus))
            self._fill(seat)
        while not self._closed:
            with suppress(Empty):
                self._calls.get(timeout=TICK_SECONDS)()
            if not self._halted:
                self._tick(time.monotonic())

    def restart(self, name: str) -> "Future[None]":
        """Let a service end and begin again. The future is done when it serves; it may hold a RingError.

        Raises KeyError for an unknown name.
        """
        seat, restarted = self.seats[name], Future[None]()
        self._calls.put(partial(self._ask, seat, restarted))
        return restarted

    def halt(self) -> None:
        """From now on nothing is started, and no end is news: the children are the caller's to end."""
        with self._starting:
            self._halted = True

    def close(self) -> None:
        """End the thread. Children that live would end with it."""
        self.halt()
        self._closed = True
        if self.is_alive():
            self.join()
        for seat in self.seats.values():
            _fail(seat, "the ring stops")

    @property
    def unserving(self) -> list[str]:
        """Names of those that do not serve, or that a router does not know yet."""
        return [seat.name for seat in self.seats.values() if not self._serves(seat)]

    def _fill(self, seat: Slot) -> None:
        """A process begins."""
        with self._starting:
            if self._halted:
                return
            seat.clear()
            for other in self.seats.values():
                other.heard.discard(seat.name)
            environment = {**self._environment, **seat.service.environment, PULSE_VARIABLE: str(seat.pulse_file)}
            try:
                seat.begin(
                    Child(
                        seat.name,
                        seat.service.role,
                        seat.service.command,
                        environment,
                        self._hear,
                        lambda child: self._calls.put(partial(self._end, seat, child)),
                        (self._folder.lock,),
                    )
                )
            except OSError as error:
                if self.up.is_set():
                    self._miss(seat, 0, f"could not be started: {error}", None)
                else:
                    self.failure = self.failure or error

    def _hear(self, line: LogLine) -> None:
        """Called from the threads that read."""
        if line.event in (READY, HEARD, LOST):
            self._calls.put(partial(self._learn, line))
        self._show(line)

    def _show(self, line: LogLine) -> None:
        try:
            self._observe(line)
        except (OSError, SystemExit):
            # Nobody reads our own output any more; the children's must still be read, or they would block.
            self._observe = ignore
        except Exception:  # noqa: BLE001 - whatever an observer does, it must not end the ring
            self._observe = ignore
            with suppress(OSError):  # where stderr cannot be written either, the supervisor goes on
                traceback.print_exc()

    def _learn(self, line: LogLine) -> None:
        seat, peer = self.seats[line.child], str(line.fields.get("peer", ""))
        if line.event == HEARD:
            seat.heard.add(peer)
        elif line.event == LOST:
            seat.heard.discard(peer)
        else:
            seat.ready_at = time.monotonic()
            address = str(line.fields.get("address", ""))
            port = address.rpartition(":")[2]
            if seat.service.role == "router" and port.isdecimal():
                seat.address, seat.service = address, seat.service.on_port(int(port))

    def _end(self, seat: Slot, child: Child) -> None:
        if self._halted or child is not seat.child:
            return
        if seat.stopping_until is not None:
            self._begin_anew(seat)
            return
        if not self.up.is_set():
            self.failure = self.failure or _failed_start(child)
            return
        ready_seconds = None if seat.ready_at is None else time.monotonic() - seat.ready_at
        ending = f"stood still for {self._freeze_timeout:g} s and was killed" if seat.frozen else _ending(child)
        self._miss(seat, child.pid, ending, ready_seconds)

    def _miss(self, seat: Slot, pid: int, ending: str, ready_seconds: float | None) -> None:
        """A process has ended by itself: another one begins later, or none does."""
        delay = seat.backoff.after(ready_seconds)
        seat.clear()
        seat.returning, seat.given_up = delay is not None, delay is None
        seat.due = None if delay is None else time.monotonic() + delay
        self._show(ended(seat.name, pid, ending, delay))
        if seat.given_up:
            _fail(seat, f"{seat.name} {ending}", seat.child.tail if seat.child and not seat.child.error else ())

    def _ask(self, seat: Slot, restarted: "Future[None]") -> None:
        if seat.restarted is not None:
            restarted.set_exception(RingError(f"{seat.name} is being restarted already"))
            return
        seat.restarted = restarted
        if seat.alive and seat.child is not None:
            seat.stopping_until = time.monotonic() + seat.service.drain_timeout + KILL_AFTER_SECONDS
            seat.child.terminate()
        else:
            self._begin_anew(seat)

    def _begin_anew(self, seat: Slot) -> None:
        seat.clear()
        seat.backoff = Backoff(seat.backoff.max_failed_starts)
        seat.returning, seat.given_up, seat.due = True, False, time.monotonic()

    def _tick(self, now: float) -> None:
        for seat in self.seats.values():
            if seat.due is not None and now >= seat.due:
                self._fill(seat)
            if seat.stopping_until is not None and now > seat.stopping_until and seat.child is not None:
                seat.child.kill()
            if seat.returning and seat.child is not None and self._serves(seat):
                seat.returning = False
                self._show(serves_again(seat.name, seat.child.pid))
                if seat.restarted is not None:
                    seat.restarted.set_result(None)
                    seat.restarted = None
        if not self.up.is_set() and not self.unserving:
            self.up.set()
        if now - self._looked_at >= LOOK_SECONDS:
            self._look(now)

    def _look(self, now: float) -> None:
        """Kill those that stand still."""
        late = now - self._looked_at - LOOK_SECONDS
        self._looked_at = now
        for seat in self.seats.values():
            if late > LOOK_SECONDS:
                # We stood still ourselves: the others' stillness then says nothing.
                seat.pulse_at += late
            still = seat.alive and seat.stopping_until is None and seat.look(now) > self._freeze_timeout
            if still and not seat.frozen and seat.child is not None:
                seat.frozen = True
                seat.child.kill()

    def _serves(self, seat: Slot) -> bool:
        """It listens, and so far as routers and peers listen they know each other."""
        ready = [other for other in self.seats.values() if other.ready]
        if seat.service.role == "router":
            return seat.ready and seat.heard >= {other.name for other in ready if other.service.role != "router"}
        return seat.ready and all(seat.name in other.heard for other in ready if other.service.role == "router")


def _failed_start(child: Child) -> RingError:
    if child.error:
        return RingError(f"{child.name} cannot start: {child.error}")
    return RingError(f"{child.name} {child.ending} while starting", child.tail)


def _ending(child: Child) -> str:
    return f"{child.ending}: {child.error}" if child.error else child.ending


def _fail(seat: Slot, message: str, tail: Sequence[str] = ()) -> None:
    """Tell whoever waits for its restart."""
    if seat.restarted is not None:
        seat.restarted.set_exception(RingError(message, tail))
        seat.restarted = None
