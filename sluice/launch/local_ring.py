"""A ring on this machine: its start, its end, and restarts on demand."""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from sluice import tiny_model
from sluice.launch.child import Child
from sluice.launch.errors import RingError
from sluice.launch.gpus import OptionsError
from sluice.launch.hosts import LOCAL, open_hosts
from sluice.launch.installed import check_installed
from sluice.launch.logs import Observe, ignore
from sluice.launch.plan import Plan, services
from sluice.launch.servable import check_servable
from sluice.launch.slot import Slot
from sluice.launch.supervisor import KILL_AFTER_SECONDS, Supervisor
from sluice.ring.checkpoint import Checkpoint, open_checkpoint
from sluice.ring.draft_model import check_draft_model
from sluice.ring.keys import ROLES, Role
from sluice.ring.ports import Port, PortError, check_ports
from sluice.settings.services import EngineSettings

TINY_MODEL_NAME = "tiny"
POLL_SECONDS = 0.05
# Short: a signal that arrives just before an unbounded wait would not end it.
SIGNAL_SECONDS = 0.25


class Ring:
    """Routers, engines and detokenizers as processes: `with Ring(engines=2) as ring: Client(ring.address)`.

    `model` is a checkpoint folder or hub id, None the bundled tiny model; `revision` is a branch, tag or commit of a
    hub id; `on` is where services run: "local", "ray" or "ray=ADDRESS"; the other options are those of `Plan`. Once
    everything has served, a service that exits is restarted at the same address. `observe` gets every log line,
    including the launcher's own. The children die with this process.

    Raises CheckpointError for a model that cannot be opened or served, OptionsError for wrong options, RingError for a
    port in use or a failed start.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        name: str | None = None,
        revision: str | None = None,
        on: str = LOCAL,
        start_timeout: float = 600.0,
        observe: Observe = ignore,
        **options: Any,
    ) -> None:
        if on == LOCAL and "python" not in options:
            check_installed()
        if model is None:
            model, name = tiny_model.path(), name or TINY_MODEL_NAME
        checkpoint = open_checkpoint(str(model), name, revision=revision)
        # On other machines the cache of the hub may be elsewhere.
        by_path = on == LOCAL or Path(model).expanduser().is_dir()
        where = str(checkpoint.path if by_path else model)
        if not by_path:
            options["shared_args"] = {"revision": revision, **options.get("shared_args", {})}
        self.plan = Plan(model=where, name=checkpoint.name, **options)
        planned = services(self.plan, Path())
        settings = [each.settings(os.environ) for each in planned]
        engine = next(each for each in settings if isinstance(each, EngineSettings))
        if self.plan.http_port:
            _check_gateway(on)
        _check_models(checkpoint, engine)
        if on == LOCAL:
            _check_ports(
                replace(port, owner=service.name, setting=_flag(service.role, port.setting))
                for service, own in zip(planned, settings, strict=True)
                for port in own.ports
            )
        self._start_timeout = start_timeout
        self._observe = observe
        self._hosts = open_hosts(on, self.plan, engine)
        self._supervisor: Supervisor | None = None

    @property
    def addresses(self) -> list[str]:
        """Of the routers, such as "127.0.0.1:50051"; empty before they are ready."""
        return [slot.address for slot in self._slots if slot.address]

    @property
    def address(self) -> str:
        """Of the first router; empty before it is ready."""
        return next(iter(self.addresses), "")

    @property
    def children(self) -> dict[str, Child]:
        """By service: "router" (or "router-0", …), "engine-0", …, "detok-0", … Exited ones stay until replaced."""
        return {slot.name: slot.child for slot in self._slots if slot.child is not None}

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self.children.items()}

    @property
    def missing(self) -> list[Role]:
        """Roles whose every service has been given up: no request can be served."""
        return [role for role in ROLES if all(slot.given_up for slot in self._slots if slot.service.role == role)]

    @property
    def http_address(self) -> str:
        """Of the gateway; empty without one."""
        found = (slot.reader.status.address for slot in self._slots if slot.service.role == "gateway")
        return next(found, "")

    def start(self) -> None:
        """Wait until all services serve. Leaves nothing running if it raises."""
        try:
            self._supervisor = Supervisor(self._hosts.open(), self.plan, self._hosts, self._observe)
            self._supervisor.start()
            self._await_ready(self._supervisor, time.monotonic() + self._start_timeout)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Drain all services, then stop them."""
        if self._supervisor is not None:
            self._supervisor.halt()
        # First what takes requests: live streams end only while the services behind still run.
        in_front = ("gateway", "router")
        for role in in_front:
            self._stop([slot for slot in self._slots if slot.service.role == role])
        self._stop([slot for slot in self._slots if slot.service.role not in in_front])

    def kill(self) -> None:
        """Kill the remaining processes and remove what they met in."""
        if self._supervisor is not None:
            self._supervisor.halt()
            children = list(self.children.values())
            for child in children:
                child.kill()
            for child in children:
                child.wait(KILL_AFTER_SECONDS)
            self._supervisor.close()
        self._hosts.close()

    def restart(self, name: str) -> None:
        """Drain and restart one service, also one that was given up. Raises KeyError, RingError."""
        if self._supervisor is None:
            raise RingError("the ring has not been started")
        restarted = self._supervisor.restart(name)
        drain = self._supervisor.slots[name].service.drain_timeout + KILL_AFTER_SECONDS
        deadline = time.monotonic() + drain + self._start_timeout
        while not restarted.done():
            if time.monotonic() > deadline or not self._supervisor.is_alive():
                raise RingError(f"{name} did not come back")
            time.sleep(POLL_SECONDS)
        restarted.result()

    def restart_all(self) -> None:
        """One service after another. Raises RingError at the first that does not serve again."""
        for slot in self._slots:
            self.restart(slot.name)

    def watch(self, stop: Callable[[], bool] = lambda: False) -> list[Role]:
        """Wait until some role is `missing` or `stop` returns True. Returns the missing roles."""
        while self._supervisor is not None and self._supervisor.is_alive() and not self.missing:
            if stop():
                break
            time.sleep(SIGNAL_SECONDS)
        return self.missing

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self.kill()

    @property
    def _slots(self) -> list[Slot]:
        return list(self._supervisor.slots.values()) if self._supervisor is not None else []

    def _await_ready(self, supervisor: Supervisor, deadline: float) -> None:
        while not supervisor.up.wait(POLL_SECONDS):
            if supervisor.failure is not None:
                raise supervisor.failure
            if not supervisor.is_alive():
                raise RingError("stopped while starting")
            if time.monotonic() > deadline:
                raise RingError(f"waited {self._start_timeout:g} s for {', '.join(supervisor.not_serving)} to serve")

    def _stop(self, slots: list[Slot]) -> None:
        now = time.monotonic()
        for slot in slots:
            if slot.child is not None:
                slot.child.terminate()
        for slot in slots:
            deadline = now + slot.service.drain_timeout + KILL_AFTER_SECONDS
            if slot.child is not None and not slot.child.wait(deadline - time.monotonic()):
                slot.child.kill()


def _check_models(checkpoint: Checkpoint, engine: EngineSettings) -> None:
    """Raises CheckpointError."""
    weights = engine.weights == "checkpoint"
    check_servable(checkpoint, weights=weights)
    if engine.draft_model is not None:
        draft = open_checkpoint(engine.draft_model)
        check_servable(draft, weights=weights)
        check_draft_model(checkpoint, draft)


def _check_gateway(on: str) -> None:
    if on != LOCAL:
        raise OptionsError("http_port: a gateway starts on this machine only; run python -m gateway by itself")
    if find_spec("starlette") is None:
        raise OptionsError("http_port needs the gateway's packages: pip install 'sluice-serve[gateway]'")


def _flag(role: str, setting: str) -> str:
    """What `sluice serve` calls the setting of a service."""
    return "http_port" if (role, setting) == ("gateway", "port") else setting


def _check_ports(ports: Iterable[Port]) -> None:
    # Here already: a child would notice a port in use only after its slow imports.
    try:
        check_ports(ports)
    except PortError as error:
        raise RingError(str(error)) from error
