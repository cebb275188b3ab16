"""A ring on this machine: starts the services as child processes, keeps them running, and ends them in order."""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sluice import tiny_model
from sluice.launch.child import Child, Role
from sluice.launch.folder import Folder, remove_stale
from sluice.launch.gpus import gpus_of_engines
from sluice.launch.logs import Observe, ignore
from sluice.launch.plan import Plan, child_environment, services
from sluice.launch.servable import check_servable
from sluice.launch.slot import Slot
from sluice.launch.supervisor import KILL_AFTER_SECONDS, RingError, Supervisor
from sluice.ring.checkpoint import open_checkpoint
from sluice.ring.ports import Port, PortError, check_ports
from sluice.settings.services import EngineSettings

ROLES: tuple[Role, ...] = ("router", "engine", "detok")
TINY_MODEL_NAME = "tiny"
POLL_SECONDS = 0.05
SIGNAL_SECONDS = 0.25


class Ring:
    """Routers, engines and detokenizers as processes: `with Ring(engines=2) as ring: Client(ring.address)`.

    `model` is a checkpoint folder or hub id, None the tiny model in the box; `revision` is a branch, tag or commit of a
    hub id; the other options are those of `Plan`.
    Once everything has served, a service that ends is started again at its address. `observe` gets every log line, and
    one of each such end and return.
    The children die with this process.
    Raises CheckpointError for a model that cannot be opened or served, OptionsError for wrong options, RingError for a
    port in use, and if it cannot start.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        name: str | None = None,
        revision: str | None = None,
        start_timeout: float = 600.0,
        observe: Observe = ignore,
        **options: Any,
    ) -> None:
        if model is None:
            model, name = tiny_model.path(), name or TINY_MODEL_NAME
        checkpoint = open_checkpoint(str(model), name, revision=revision)
        self.plan = Plan(model=str(checkpoint.path), name=checkpoint.name, **options)
        planned = services(self.plan, Path())
        settings = [each.settings(os.environ) for each in planned]
        self._engine_settings = next(each for each in settings if isinstance(each, EngineSettings))
        check_servable(checkpoint, weights=self._engine_settings.weights == "checkpoint")
        _check_ports(
            replace(port, owner=service.name)
            for service, own in zip(planned, settings, strict=True)
            for port in own.ports
        )
        self._start_timeout = start_timeout
        self._observe = observe
        self._folder: Folder | None = None
        self._supervisor: Supervisor | None = None

    @property
    def addresses(self) -> list[str]:
        """Of the routers, such as "127.0.0.1:50051"; known once they have started."""
        return [seat.address for seat in self._seats if seat.address]

    @property
    def address(self) -> str:
        """Of the first router; empty before it has started."""
        return next(iter(self.addresses), "")

    @property
    def children(self) -> dict[str, Child]:
        """By service: "router" (or "router-0", … where there are several), "engine-0", …, "detok-0", …

        Those that run, or have ended and were not started again yet.
        """
        return {seat.name: seat.child for seat in self._seats if seat.child is not None}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by service."""
        return {name: child.pid for name, child in self.children.items()}

    @property
    def missing(self) -> list[Role]:
        """Roles of which every service has been given up: while there are any, nothing can be served."""
        return [role for role in ROLES if all(seat.given_up for seat in self._seats if seat.service.role == role)]

    def start(self) -> None:
        """Start everything and wait until all of it serves. Leaves nothing running if it raises."""
        try:
            remove_stale()
            self._folder = Folder()
            gpus = gpus_of_engines(self.plan.engines, self._engine_settings, os.environ)
            planned = services(self.plan, self._folder.path, gpus)
            self._supervisor = Supervisor(planned, self.plan, self._folder, child_environment(), self._observe)
            self._supervisor.start()
            self._await_ready(self._supervisor, time.monotonic() + self._start_timeout)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Drain: the routers first, so that live streams end; then engines and detokenizers, for which nobody waits."""
        if self._supervisor is not None:
            self._supervisor.halt()
        self._stop([seat for seat in self._seats if seat.service.role == "router"])
        self._stop([seat for seat in self._seats if seat.service.role != "router"])

    def kill(self) -> None:
        """End what still runs at once, and remove the sockets."""
        if self._supervisor is not None:
            self._supervisor.halt()
            children = list(self.children.values())
            for child in children:
                child.kill()
            for child in children:
                child.wait(KILL_AFTER_SECONDS)
            self._supervisor.close()
        if self._folder is not None:
            self._folder.remove()

    def restart(self, name: str) -> None:
        """Let one service drain and begin again; returns when it serves. For a service that was given up too.

        Raises KeyError for an unknown name, RingError if it does not come back.
        """
        if self._supervisor is None:
            raise RingError("the ring has not been started")
        restarted = self._supervisor.restart(name)
        drain = self._supervisor.seats[name].service.drain_timeout + KILL_AFTER_SECONDS
        deadline = time.monotonic() + drain + self._start_timeout
        while not restarted.done():
            if time.monotonic() > deadline or not self._supervisor.is_alive():
                raise RingError(f"{name} did not come back")
            time.sleep(POLL_SECONDS)
        restarted.result()

    def restart_all(self) -> None:
        """A rolling restart: one service after the other. Raises RingError at the first that does not come back."""
        for seat in self._seats:
            self.restart(seat.name)

    def watch(self, stop: Callable[[], bool] = lambda: False) -> list[Role]:
        """Wait until nothing can be served any more, or `stop` says so, and return what is `missing`."""
        while self._supervisor is not None and self._supervisor.is_alive() and not self.missing:
            if stop():
                break
            # Not for long: a signal that comes just before an endless wait would not end it.
            time.sleep(SIGNAL_SECONDS)
        return self.missing

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self.kill()

    @property
    def _seats(self) -> list[Slot]:
        return list(self._supervisor.seats.values()) if self._supervisor is not None else []

    def _await_ready(self, supervisor: Supervisor, deadline: float) -> None:
        while not supervisor.up.wait(POLL_SECONDS):
            if supervisor.failure is not None:
                raise supervisor.failure
            if not supervisor.is_alive():
                raise RingError("stopped while starting")
            if time.monotonic() > deadline:
                raise RingError(f"waited {self._start_timeout:g} s for {', '.join(supervisor.unserving)} to serve")

    def _stop(self, seats: list[Slot]) -> None:
        now = time.monotonic()
        for seat in seats:
            if seat.child is not None:
                seat.child.terminate()
        for seat in seats:
            deadline = now + seat.service.drain_timeout + KILL_AFTER_SECONDS
            if seat.child is not None and not seat.child.wait(deadline - time.monotonic()):
                seat.child.kill()


def _check_ports(ports: Iterable[Port]) -> None:
    """Raises RingError where one is in use: a process that is started would say so much later."""
    try:
        check_ports(ports)
    except PortError as error:
        raise RingError(str(error)) from error
