"""The thread that starts services, detects when they exit or freeze, and restarts them."""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from sluice.launch.errors import RingError
from sluice.launch.hosts import Child, Hosts, Peers
from sluice.launch.logs import SERVICE_RECOVERED, LogLine, Observe, ignore, launcher_line, service_exited
from sluice.launch.plan import GATEWAY, Plan, Service
from sluice.launch.slot import Backoff, Slot
from sluice.telemetry.service_status import StatusReader

TICK_SECONDS = 0.05
FREEZE_CHECK_SECONDS = 1.0
KILL_AFTER_SECONDS = 5.0
"""Time after its drain timeout at which a child that has not exited is killed."""


class Supervisor(threading.Thread):
    """Owns all slots. Children die with the thread that started them, so this thread runs until `close`."""

    def __init__(self, services: Sequence[Service], plan: Plan, hosts: Hosts, observe: Observe) -> None:
        super().__init__(name="ring", daemon=True)
        self.slots = {
            service.name: Slot(service, StatusReader(hosts.status(service.name)), Backoff(plan.max_failed_starts))
            for service in services
        }
        self.up = threading.Event()
        """Set once all services have served at the same time."""
        self.failure: OSError | RingError | None = None
        """The reason why the ring could not start."""
        self._freeze_timeout = plan.freeze_timeout
        self._hosts = hosts
        self._peers: Peers = {}
        """The peers last announced to the hosts."""
        self._observe = observe
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._starting = threading.Lock()
        self._halted = False
        self._closed = False
        self._freeze_checked_at = time.monotonic()

    def run(self) -> None:
        for line in self._hosts.remarks:
            self._show(line)
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
        """Drain a service and start it again. The future completes once the service serves, or fails with a RingError.

        Raises KeyError for an unknown name.
        """
        slot, restarted = self.slots[name], Future[None]()
        self._calls.put(partial(self._begin_restart, slot, restarted))
        return restarted

    def halt(self) -> None:
        """Start no more services and ignore exits, so that the caller can stop the children."""
        with self._starting:
            self._halted = True

    def close(self) -> None:
        """End the thread, which ends all remaining children."""
        self.halt()
        self._closed = True
        if self.is_alive():
            self.join()
        for slot in self.slots.values():
            _fail_restart(slot, "the ring stops")

    @property
    def not_serving(self) -> list[str]:
        """Names of the services that do not serve."""
        return [slot.name for slot in self.slots.values() if not self._serves(slot)]

    def _start_child(self, slot: Slot) -> None:
        # Under the lock, because a child that started after `halt` has returned would not be stopped.
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
        """Pass a line to the observer. Called from the children's reader threads too."""
        try:
            self._observe(line)
        except (OSError, SystemExit):
            # The launcher's output is closed. The children's output must still be read, or they would block.
            self._observe = ignore
        except Exception:  # noqa: BLE001 - an error of the observer must not end the ring
            self._observe = ignore
            with suppress(OSError):  # The supervisor continues even if stderr cannot be written.
                traceback.print_exc()

    def _on_exit(self, slot: Slot, child: Child) -> None:
        # Ignore a late report of a child that has been replaced already.
        if self._halted or child is not slot.child:
            return
        if slot.kill_at is not None:
            self._start_again(slot)
            return
        if not self.up.is_set():
            # Services are not restarted before the ring has been up once, because invalid options would fail again.
            self.failure = self.failure or _failed_start(child)
            return
        # The service may have become ready since the last tick.
        slot.poll(time.monotonic())
        ready_seconds = None if slot.ready_at is None else time.monotonic() - slot.ready_at
        how = f"was frozen for {self._freeze_timeout:g} s and was killed" if slot.frozen else child.ending
        self._schedule_restart(slot, child.pid, how, ready_seconds)

    def _schedule_restart(self, slot: Slot, pid: int, how: str, ready_seconds: float | None) -> None:
        """Schedule a restart after an unexpected exit, or give up the service if it failed to start too often."""
        delay = slot.backoff.after(ready_seconds)
        slot.clear()
        slot.returning, slot.given_up = delay is not None, delay is None
        slot.start_at = None if delay is None else time.monotonic() + delay
        self._show(service_exited(slot.name, pid, how, delay))
        if ready_seconds is None:
            # What a former process has left may be why the service cannot start. One that is given up failed to start.
            self._hosts.discard(slot.name)
        if slot.given_up:
            if slot.service.role == GATEWAY and all(other.given_up for other in self._gateways):
                # Connections would wait for a gateway forever.
                self._hosts.release_ports()
            _fail_restart(slot, f"{slot.name} {how}", slot.child.tail if slot.child and not slot.child.error else ())

    @property
    def _gateways(self) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.service.role == GATEWAY]

    def _begin_restart(self, slot: Slot, restarted: "Future[None]") -> None:
        if slot.restarted is not None:
            restarted.set_exception(RingError(f"{slot.name} is already being restarted"))
            return
        slot.restarted = restarted
        if slot.alive and slot.child is not None:
            slot.kill_at = time.monotonic() + slot.service.drain_timeout + KILL_AFTER_SECONDS
            slot.child.terminate()
        else:
            self._start_again(slot)

    def _start_again(self, slot: Slot) -> None:
        """Start the service at the next tick, without backoff."""
        slot.clear()
        # A requested restart is not a failure. It also restarts a service that has been given up.
        slot.backoff = Backoff(slot.backoff.max_failed_starts)
        slot.returning, slot.given_up, slot.start_at = True, False, time.monotonic()

    def _tick(self, now: float) -> None:
        for slot in self.slots.values():
            if slot.start_at is not None and now >= slot.start_at:
                self._start_child(slot)
            if slot.kill_at is not None and now > slot.kill_at and slot.child is not None:
                slot.child.kill()
            if slot.alive:
                self._poll(slot, now)
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

    def _poll(self, slot: Slot, now: float) -> None:
        was_ready = slot.ready_at is not None
        slot.poll(now)
        if slot.ready_at is not None and not was_ready:
            # What the process did not take over at its start is of no more use.
            self._hosts.discard(slot.name)

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
                # The launcher itself was suspended, perhaps with the whole machine: do not count that time.
                slot.reader.forgive(late, now)
            frozen = slot.alive and slot.kill_at is None and slot.stalled_seconds(now) > self._freeze_timeout
            if frozen and not slot.frozen and slot.child is not None:
                slot.frozen = True
                slot.child.kill()

    def _serves(self, slot: Slot) -> bool:
        """Whether the service is ready and every ready router receives the heartbeats of its current process.

        For a router: whether it receives the heartbeats of every ready engine and detokenizer.
        """
        if not slot.service.on_ring:
            # A gateway becomes ready only once it has reached a router. A keeper needs none.
            return slot.ready
        ready = [other for other in self.slots.values() if other.ready and other.service.on_ring]
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
