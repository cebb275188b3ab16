"""`Ring`: starts and stops a ring, and restarts its services on demand."""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from sluice import tiny_model
from sluice.checkpoint.folder import Checkpoint, fetch_weights, open_checkpoint
from sluice.checkpoint.servable import check_draft_model, check_servable
from sluice.checkpoint.weight_files import check_weight_files
from sluice.gguf.folder import gguf_folder, is_gguf
from sluice.host.installation import how_to_install, missing_packages
from sluice.host.ports import Port, PortError, check_ports
from sluice.lanes.keys import ROLES, Role
from sluice.launch.errors import OptionsError, RingError
from sluice.launch.hosts import LOCAL, Child, Hosts, place
from sluice.launch.hosts.local import LocalHosts
from sluice.launch.keeper import check_access
from sluice.launch.logs import Observe, ignore
from sluice.launch.options import RING_OPTIONS, check_ring_options
from sluice.launch.plan import Plan, Service, reached_at, services
from sluice.launch.slot import Slot
from sluice.launch.supervisor import KILL_AFTER_SECONDS, Supervisor
from sluice.settings.keeper import KeeperSettings
from sluice.settings.process import ProcessSettings
from sluice.settings.services import EngineSettings, RouterSettings

TINY_MODEL_NAME = "tiny"
EXTRAS = ("router", "detok", "engine")
POLL_SECONDS = 0.05
SIGNAL_SECONDS = 0.25
"""Interval at which `watch` checks for signals. An unbounded wait would miss a signal that arrives just before it."""


class Ring:
    """Routers, engines and detokenizers as processes: `with Ring(engines=2) as ring: Client(ring.address)`.

    `model` is a checkpoint folder or a Hugging Face id; None is the bundled tiny model. `revision` is a branch, tag or
    commit of a Hugging Face model. `on` is where the services run: "local", "ray" or "ray=ADDRESS". The other options
    are those of `Plan`. Once all services have been ready, a service that exits is restarted at the same address.
    `observe` is called with every log line, including those of the launcher. The services end with this process.

    Raises CheckpointError if the model cannot be opened or served, TypeError for an unknown option, OptionsError for
    invalid options, RingError if a port is in use or a service fails to start.
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
        check_ring_options(options, RING_OPTIONS)
        if on == LOCAL and "python" not in options:
            check_installed()
        self.is_bundled = model is None
        """Whether the model is the bundled one."""
        if model is None:
            model, name = tiny_model.path(), name or TINY_MODEL_NAME
        if revision is None and is_gguf(str(model)):
            name, model = name or Path(model).stem, gguf_folder(str(model))
        checkpoint = open_checkpoint(str(model), name, revision=revision, weights=False)
        # Other machines may have the Hugging Face cache in another folder, so they get the id of the model.
        by_path = on == LOCAL or Path(model).expanduser().is_dir()
        location = str(checkpoint.path if by_path else model)
        if not by_path:
            options["shared_args"] = {"revision": revision, **options.get("shared_args", {})}
        self.plan = Plan(model=location, name=checkpoint.name, **options)
        planned = services(self.plan, Path())
        settings = [service.settings(os.environ) for service in planned]
        engine = next(service for service in settings if isinstance(service, EngineSettings))
        if self.plan.http_port:
            _check_gateway(on)
        if self.plan.keeper_option:
            _check_keeper(on, self.plan.keeper_option, settings)
        _check_models(checkpoint, str(model), engine)
        if on == LOCAL:
            _check_ports(
                replace(port, owner=service.name, setting=_flag(service.role, port.setting))
                for service, service_settings in zip(planned, settings, strict=True)
                for port in service_settings.ports
            )
        self.status_pages = _status_pages(settings)
        """URLs of the routers' status pages, on the machines of the routers. Empty without `metrics_port`."""
        self.router_settings = next(service for service in settings if isinstance(service, RouterSettings))
        """Settings of the first router."""
        self.chats = checkpoint.has_chat or self.router_settings.chat_template is not None
        """Whether there is a chat template."""
        self._start_timeout = start_timeout
        self._observe = observe
        self._hosts = _hosts(on, self.plan, engine)
        self._supervisor: Supervisor | None = None

    @property
    def addresses(self) -> list[str]:
        """Addresses of the routers that are ready, such as "127.0.0.1:50051"."""
        return [slot.address for slot in self._slots if slot.address]

    @property
    def address(self) -> str:
        """Address of the first router. Empty before it is ready."""
        return next(iter(self.addresses), "")

    @property
    def children(self) -> dict[str, Child]:
        """The processes by service: "router" (or "router-0", …), "engine-0", …, "engine-prefill-0", …,
        "engine-decode-0", …, "detok-0", …, "gateway" (or "gateway-0", …), "keeper".

        A process that has exited stays until it is replaced.
        """
        return {slot.name: slot.child for slot in self._slots if slot.child is not None}

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self.children.items()}

    @property
    def missing(self) -> list[Role]:
        """Roles of which every service has failed permanently, so that no request can be served."""
        return [role for role in ROLES if all(slot.given_up for slot in self._slots if slot.service.role == role)]

    @property
    def http_address(self) -> str:
        """Address that all gateways share. Empty without one."""
        addresses = (slot.reader.status.address for slot in self._slots if slot.service.role == "gateway")
        return next(filter(None, addresses), "")

    def start(self) -> None:
        """Start all services and wait until they serve. If it raises, no process is left running."""
        try:
            self._supervisor = Supervisor(self._open_hosts(), self.plan, self._hosts, self._observe)
            self._supervisor.start()
            self._await_ready(self._supervisor, time.monotonic() + self._start_timeout)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Drain all services, then stop them."""
        if self._supervisor is not None:
            self._supervisor.halt()
            # Otherwise connections would wait for gateways that have ended, instead of being refused.
            self._hosts.release_ports()
        # Those that accept requests come first, because streams can only finish while engines and detokenizers run.
        frontends = ("gateway", "router")
        for role in frontends:
            self._stop([slot for slot in self._slots if slot.service.role == role])
        self._stop([slot for slot in self._slots if slot.service.role not in frontends])

    def kill(self) -> None:
        """Kill the remaining processes, and remove their folders or actors."""
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
        """Drain and restart one service, even if it has failed permanently. Raises KeyError, RingError."""
        if self._supervisor is None:
            raise RingError("the ring has not been started")
        restarted = self._supervisor.restart(name)
        drain_seconds = self._supervisor.slots[name].service.drain_timeout + KILL_AFTER_SECONDS
        deadline = time.monotonic() + drain_seconds + self._start_timeout
        while not restarted.done():
            if time.monotonic() > deadline or not self._supervisor.is_alive():
                raise RingError(f"{name} did not serve again after its restart")
            time.sleep(POLL_SECONDS)
        restarted.result()

    def restart_all(self) -> None:
        """Restart one service after another. Raises RingError for the first that does not serve again."""
        for slot in self._slots:
            self.restart(slot.name)

    def watch(self, stop: Callable[[], bool] = lambda: False) -> list[Role]:
        """Wait until a role is `missing` or `stop` returns True. Returns the missing roles."""
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

    def _open_hosts(self) -> list[Service]:
        try:
            return self._hosts.open()
        except PortError as error:
            raise RingError(str(error)) from error

    def _await_ready(self, supervisor: Supervisor, deadline: float) -> None:
        while not supervisor.up.wait(POLL_SECONDS):
            if supervisor.failure is not None:
                raise supervisor.failure
            if not supervisor.is_alive():
                raise RingError("stopped while starting")
            if time.monotonic() > deadline:
                raise RingError(
                    f"{', '.join(supervisor.not_serving)} did not serve within start_timeout, {self._start_timeout:g} s"
                )

    def _stop(self, slots: list[Slot]) -> None:
        now = time.monotonic()
        for slot in slots:
            if slot.child is not None:
                slot.child.terminate()
        for slot in slots:
            deadline = now + slot.service.drain_timeout + KILL_AFTER_SECONDS
            if slot.child is not None and not slot.child.wait(deadline - time.monotonic()):
                slot.child.kill()


def check_installed() -> None:
    """Raises OptionsError if packages are missing."""
    if missing := missing_packages(*EXTRAS):
        raise OptionsError(
            f"this installation cannot serve: missing {', '.join(missing)}. Install with: {how_to_install(*EXTRAS)}"
        )


def _hosts(on: str, plan: Plan, engine: EngineSettings) -> Hosts:
    """The hosts that `on` names, in the form of `place`. Raises OptionsError."""
    kind, address = place(on)
    if kind == LOCAL:
        return LocalHosts(plan, engine)
    # ray takes seconds to import.
    from sluice.launch.hosts.ray import RayHosts

    return RayHosts(plan, engine, address)


def _check_models(checkpoint: Checkpoint, model: str, engine: EngineSettings) -> None:
    """Check the model and the draft model, and download their weights if they can be served. Raises CheckpointError."""
    models = [(checkpoint, model)]
    if engine.draft_model is not None:
        models.append((open_checkpoint(engine.draft_model, weights=False), engine.draft_model))
        check_draft_model(checkpoint, models[1][0])
    for small, _ in models:
        check_servable(small)
    for small, name in models:
        if engine.weights == "checkpoint":
            check_weight_files(fetch_weights(small, name).path)


def _check_gateway(on: str) -> None:
    if on != LOCAL:
        raise OptionsError("http_port: a gateway can only be started on this machine; run python -m gateway separately")
    if find_spec("starlette") is None:
        raise OptionsError("http_port needs the gateway's packages: pip install 'sluice-serve[gateway]'")


def _check_keeper(on: str, option: str, settings: Iterable[ProcessSettings]) -> None:
    if on != LOCAL:
        raise OptionsError(f"{option}: a keeper can only be started on the machine of its engines, not with on = {on}")
    for service in settings:
        if isinstance(service, KeeperSettings):
            check_access(service)


def _status_pages(settings: Iterable[ProcessSettings]) -> list[str]:
    return [
        f"http://{reached_at(service.metrics_host, service.metrics_port)}/"
        for service in settings
        if isinstance(service, RouterSettings) and service.metrics_port
    ]


def _flag(role: str, setting: str) -> str:
    """The name of the option of `sluice serve` for a service's setting."""
    return "http_port" if (role, setting) == ("gateway", "port") else setting


def _check_ports(ports: Iterable[Port]) -> None:
    """Raises RingError for a port in use. The services check their ports too, but only after their slow imports."""
    # The port that gateways share is checked once.
    separate = {(port.host, port.number): port for port in reversed(list(ports))}
    try:
        check_ports(reversed(separate.values()))
    except PortError as error:
        raise RingError(str(error)) from error
