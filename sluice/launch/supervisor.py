"""The one thread that starts services, notices when they exit or freeze, and restarts them."""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from sluice.launch.child import Child
from sluice.launch.errors import RingError
from sluice.launch.hosts import Hosts, Peers
from sluice.launch.logs import SERVICE_RECOVERED, LogLine, Observe, ignore, launcher_line, service_exited
from sluice.launch.plan import Plan, Service
from sluice.launch.slot import Backoff, Slot
from sluice.telemetry.service_status import StatusReader

TICK_SECONDS = 0.05
FREEZE_CHECK_SECONDS = 1.0
# A child that has not exited this long after its drain timeout is killed.
KILL_AFTER_SECONDS = 5.0


class Supervisor(threading.Thread):
    """Owner of all slots. Children die with the thread that started them, so this one lives until `close`."""

    def __init__(self, services: Sequence[Service], plan: Plan, hosts: Hosts, observe: Observe) -> None:
        super().__init__(name="ring", daemon=True)
        self.slots = {
            each.name: Slot(each, StatusReader(hosts.status(each.name)), Backoff(plan.max_failed_starts))
            for each in services
        }
        self.up = threading.Event()
        """Set once everything has served."""
        self.failure: OSError | RingError | None = None
        """Why the ring could not start."""
        self._freeze_timeout = plan.freeze_timeout
        self._hosts = hosts
        self._peers: Peers = {}
        """As last announced to the hosts."""
        self._observe = observe
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._starting = threading.Lock()
        self._halted = False
        self._closed = False
        self._freeze_checked_at = time.monotonic()

    def run(self) -> None:
        for slot in self.slots.values():
            if (gpus := slot.service.gpus) is not None:
                level = "info" if gpus.engines == 1 else "warning"
                names = ",".join(gpus.names)
                self._show(launcher_line(slot.name, "gpus_assigned", level, gpus=names, engines_on_each=gpus.engines))
            self._start_child(slot)
        while not self._closed:
            with suppress(Empty):
                self._calls.get(timeout=TICK_SECONDS)()
            if not self._halted:
                self._tick(time.monotonic())

    def restart(self, name: str) -> "Future[None]":
        """Drain a service and start it again. The future is done when it serves; it may hold a RingError.

        Raises KeyError for an unknown name.
        """
        slot, restarted = self.slots[name], Future[None]()
        self._calls.put(partial(self._begin_restart, slot, restarted))
        return restarted

    def halt(self) -> None:
        """Start nothing more and ignore exits: the caller ends the children."""
        with self._starting:
            self._halted = True

    def close(self) -> None:
        """End the thread, and with it all remaining children."""
        self.halt()
        self._closed = True
        if self.is_alive():
            self.join()
        for slot in self.slots.values():
            _fail_restart(slot, "the ring stops")

    @property
    def not_serving(self) -> list[str]:
        """Names of services."""
        return [slot.name for slot in self.slots.values() if not self._serves(slot)]

    def _start_child(self, slot: Slot) -> None:
        # Under the lock: after `halt` has returned, no child may appear that its caller would not end.
        with self._starting:
            if self._halted:
                return
            slot.clear()
            try:
                slot.child = self._hosts.start(
                    slot.service, self._show, lambda child: self._calls.put(partial(self._on_exit, slot, child))
                )
                slot.start_at = None
            except OSError as error:
                if self.up.is_set():
                    self._schedule_restart(slot, 0, f"could not be started: {error}", None)
                else:
                    self.failure = self.failure or error

    def _show(self, line: LogLine) -> None:
        """Called from the children's reader threads too."""
        try:
            self._observe(line)
        except (OSError, SystemExit):
            # Our own output is closed. The children's must still be read, or they would block.
            self._observe = ignore
        except Exception:  # noqa: BLE001 - no error of an observer may end the ring
            self._observe = ignore
            with suppress(OSError):  # if stderr cannot be written either, the supervisor continues
                traceback.print_exc()

    def _on_exit(self, slot: Slot, child: Child) -> None:
        # A late report, of a child that was replaced already, is of no interest.
        if self._halted or child is not slot.child:
            return
        if slot.kill_at is not None:
            self._start_anew(slot)
            return
        if not self.up.is_set():
            # Nothing is restarted before everything has served once: wrong options would fail again.
            self.failure = self.failure or _failed_start(child)
            return
        # It may have become ready since the last tick.
        slot.poll(time.monotonic())
        ready_seconds = None if slot.ready_at is None else time.monotonic() - slot.ready_at
        how = f"stood still for {self._freeze_timeout:g} s and was killed" if slot.frozen else child.ending
        self._schedule_restart(slot, child.pid, how, ready_seconds)

    def _schedule_restart(self, slot: Slot, pid: int, how: str, ready_seconds: float | None) -> None:
        """After an unexpected exit; or give the service up."""
        delay = slot.backoff.after(ready_seconds)
        slot.clear()
        slot.returning, slot.given_up = delay is not None, delay is None
        slot.start_at = None if delay is None else time.monotonic() + delay
        self._show(service_exited(slot.name, pid, how, delay))
        if slot.given_up:
            _fail_restart(slot, f"{slot.name} {how}", slot.child.tail if slot.child and not slot.child.error else ())

    def _begin_restart(self, slot: Slot, restarted: "Future[None]") -> None:
        if slot.restarted is not None:
            restarted.set_exception(RingError(f"{slot.name} is being restarted already"))
            return
        slot.restarted = restarted
        if slot.alive and slot.child is not None:
            slot.kill_at = time.monotonic() + slot.service.drain_timeout + KILL_AFTER_SECONDS
            slot.child.terminate()
        else:
            self._start_anew(slot)

    def _start_anew(self, slot: Slot) -> None:
        """At the next tick and without backoff."""
        slot.clear()
        # A requested restart is not a failure, and gives a service that was given up a new chance.
        slot.backoff = Backoff(slot.backoff.max_failed_starts)
        slot.returning, slot.given_up, slot.start_at = True, False, time.monotonic()

    def _tick(self, now: float) -> None:
        for slot in self.slots.values():
            if slot.start_at is not None and now >= slot.start_at:
                self._start_child(slot)
            if slot.kill_at is not None and now > slot.kill_at and slot.child is not None:
                slot.child.kill()
            if slot.alive:
                slot.poll(now)
            if slot.returning and slot.child is not None and self._serves(slot):
                slot.returning = False
                self._show(launcher_line(slot.name, SERVICE_RECOVERED, "info", pid=slot.child.pid))
                if slot.restarted is not None:
                    slot.restarted.set_result(None)
                    slot.restarted = None
        self._announce_peers()
        if not self.up.is_set() and not self.not_serving:
            self.up.set()
        if now - self._freeze_checked_at >= FREEZE_CHECK_SECONDS:
            self._kill_frozen(now)

    def _announce_peers(self) -> None:
        peers: Peers = {
            role: tuple(slot.inbox for slot in self.slots.values() if slot.service.role == role and slot.inbox)
            for role in ("engine", "detok")
        }
        if peers != self._peers:
            self._peers = peers
            self._hosts.announce(peers)

    def _kill_frozen(self, now: float) -> None:
        late = now - self._freeze_checked_at - FREEZE_CHECK_SECONDS
        self._freeze_checked_at = now
        for slot in self.slots.values():
            if late > FREEZE_CHECK_SECONDS:
                # This process stood still itself, perhaps with the whole machine: do not count that time.
                slot.reader.forgive(late, now)
            frozen = slot.alive and slot.kill_at is None and slot.stalled_seconds(now) > self._freeze_timeout
            if frozen and not slot.frozen and slot.child is not None:
                slot.frozen = True
                slot.child.kill()

    def _serves(self, slot: Slot) -> bool:
        """It is ready, and heartbeats of this process pass between it and every ready service across the ring."""
        if slot.service.role == "gateway":
            # It says that it is ready once a router serves it.
            return slot.ready
        ready = [other for other in self.slots.values() if other.ready and other.service.role != "gateway"]
        if slot.service.role == "router":
            return slot.ready and all(slot.receives(other) for other in ready if other.service.role != "router")
        return slot.ready and all(other.receives(slot) for other in ready if other.service.role == "router")


def _failed_start(child: Child) -> RingError:
    if child.error:
        return RingError(f"{child.name} cannot start: {child.error}")
    return RingError(f"{child.name} {child.ending} while starting", child.tail)


def _fail_restart(slot: Slot, message: str, tail: Sequence[str] = ()) -> None:
    if slot.restarted is not None:
        slot.restarted.set_exception(RingError(message, tail))
        slot.restarted = None
