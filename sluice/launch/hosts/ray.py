"""Services on a Ray cluster: an actor for each. Ray places actors and starts them again; tokens do not pass through it.

Beside `sluice/launch/ray_job.py` the only module that imports ray.
"""

import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sluice.launch.child import Child
from sluice.launch.errors import RingError
from sluice.launch.gpus import OptionsError
from sluice.launch.hosts.rank_group import RankGroup
from sluice.launch.hosts.remote_child import RemoteChild, RemoteStatus, SeatAwayError, SeatLostError
from sluice.launch.hosts.seat import Seat
from sluice.launch.logs import Observe
from sluice.launch.plan import PYTHON, Plan, Service, remote_environment, services
from sluice.launch.rank import ranks_of, ranks_per_node
from sluice.ring.keys import ROLES, Role, generate
from sluice.settings.process import is_loopback
from sluice.settings.services import EngineSettings
from sluice.telemetry.service_status import StatusSource

NAMESPACE = "sluice"
CLOSE_SECONDS = 10.0
POLL_SECONDS = 0.5


class SeatActor:
    """Seats on one node. Calls run one at a time in the main thread of the actor's process."""

    def __init__(self, keys: Mapping[str, bytes], seats: int) -> None:
        """`keys`: of the first seat; the others, of ranks that are no peers on the ring, need none."""
        address = ray.util.get_node_ip_address()
        self._seats = [Seat(address, {} if number else keys) for number in range(seats)]

    def call(self, seat: int, method: str, *arguments: Any) -> Any:
        return getattr(self._seats[seat], method)(*arguments)

    def close(self) -> None:
        for seat in self._seats:
            seat.close()


class RaySeat:
    """A `RemoteSeat`."""

    def __init__(self, actor: Any, number: int = 0) -> None:
        """`number`: among the seats of the actor."""
        self._actor = actor
        self._number = number
        self._closed = threading.Event()

    def call(self, method: str, *arguments: Any) -> Any:
        answer = self._actor.call.remote(self._number, method, *arguments)
        try:
            # An actor may wait for its place for as long as the cluster is full.
            while not ray.wait([answer], timeout=POLL_SECONDS)[0]:
                if self._closed.is_set():
                    raise SeatLostError("the ring has ended")
            return ray.get(answer)
        except ActorUnavailableError as error:
            raise SeatAwayError(str(error)) from error
        except RayActorError as error:
            raise SeatLostError(" ".join(str(error).split())) from error

    def send(self, method: str, *arguments: Any) -> None:
        if not self._closed.is_set():
            with suppress(RayError):
                self._actor.call.remote(self._number, method, *arguments)

    def close(self) -> None:
        """Calls that wait for an answer end."""
        self._closed.set()


class RayHosts:
    """A Ray cluster. Its own: the connection, unless there was one, the actors, and the keys of this ring."""

    def __init__(self, plan: Plan, engine: EngineSettings, address: str) -> None:
        """`address` of the cluster; empty: where RAY_ADDRESS says, the one on this machine, or a new one."""
        if is_loopback(plan.host):
            raise OptionsError(
                f"host {plan.host}: on Ray, routers listen on other machines. Give host 0.0.0.0, which is the address "
                "of the router's node there, with tls_certificate and tls_key, or insecure"
            )
        self.ring = f"{Path(plan.name).name}-{secrets.token_hex(3)}"
        """The actors' names begin with sluice/RING/."""
        self._plan = plan
        self._engine = engine
        self._address = address
        self._connected = False
        self._most: int | None = None
        """GPUs of the largest node when the ring began."""
        self._actors: list[Any] = []
        self._groups: list[Any] = []
        """Ray's placement groups, of engines on several nodes."""
        self._seats: dict[str, list[RaySeat]] = {}
        """By service; of an engine on several nodes, one for each rank."""
        self._status: dict[str, RemoteStatus] = {}
        self._peers: Mapping[Role, tuple[str, ...]] = {}

    def open(self) -> list[Service]:
        self._connect()
        planned = [self._fit(each) for each in services(self._plan, Path())]
        gpus = self._gpus_of_a_node()
        keys = _make_keys() if self._plan.keys is None and not self._engine.insecure_ring else {}
        for service in planned:
            self._status[service.name] = RemoteStatus()
            if service.role == "engine" and self._engine.tensor_parallel > gpus > 0:
                self._seats[service.name] = self._seats_of_ranks(service, gpus, keys)
            else:
                actor = self._make_actor(service, service.name, gpus if service.role == "engine" else 0, keys)
                self._seats[service.name] = [RaySeat(actor)]
        return planned

    def status(self, name: str) -> StatusSource:
        return self._status[name]

    def start(self, service: Service, observe: Observe, ended: Callable[[Child], None]) -> Child:
        # An actor waits here for a call; which machine it is on now is Ray's business.
        sent = replace(service, python=()) if service.python == PYTHON else service
        seats, status = self._seats[service.name], self._status[service.name]
        if len(seats) > 1:
            ranks = ranks_of(len(seats), self._gpus_of_a_node())
            return RankGroup(sent, ranks, seats, status, observe, ended)
        return RemoteChild(sent, seats[0], status, observe, ended, lambda: self._peers)

    def announce(self, peers: Mapping[Role, tuple[str, ...]]) -> None:
        self._peers = peers
        for name, seats in self._seats.items():
            if name.startswith("router"):
                seats[0].send("announce", peers)

    def close(self) -> None:
        if not self._connected:
            return
        self._connected = False
        for seat in chain.from_iterable(self._seats.values()):
            seat.close()
        with suppress(RayError):
            endings = [actor.close.remote() for actor in self._actors]
            if endings:
                # Folders are gone then. Actors that are without a place do not answer.
                ray.wait(endings, num_returns=len(endings), timeout=CLOSE_SECONDS)
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor, no_restart=True)
        for group in self._groups:
            with suppress(RayError):
                remove_placement_group(group)
        if self._owns_connection:
            ray.shutdown()

    def _connect(self) -> None:
        # In a program that uses Ray itself, the connection is the program's.
        self._owns_connection = not ray.is_initialized()
        if self._owns_connection:
            try:
                with _own_signal_handlers():
                    ray.init(self._address or None, namespace=NAMESPACE, log_to_driver=False, logging_level="WARNING")
            except (RayError, OSError, RuntimeError, ValueError) as error:
                raise RingError(f"no Ray cluster at {self._address or 'its default address'}: {error}") from error
        self._connected = True

    def _fit(self, service: Service) -> Service:
        """What a service gets of its node is what its actor reserves, not a share of this machine."""
        if service.role != "engine":
            return service
        own = {"default_threads": max(1, int(self._cpus(service))), "engines_per_gpu": 1}
        return replace(service, arguments={**service.arguments, **own})

    def _cpus(self, service: Service) -> float:
        return float(self._engine.threads or 1) if service.role == "engine" else 1.0

    def _gpus_of_a_node(self) -> int:
        """That an engine, or its share there, reserves."""
        if self._most is None:
            nodes = [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]
            self._most = int(max(nodes, default=0))
        ranks = self._engine.tensor_parallel
        if self._engine.device == "cpu" or (self._engine.device == "auto" and not self._most):
            return 0
        return ranks_per_node(ranks, self._most or ranks)

    def _seats_of_ranks(self, service: Service, share: int, keys: Mapping[str, bytes]) -> list[RaySeat]:
        """Of an engine with `share` ranks on each of several nodes, which are reserved together."""
        bundle = {"CPU": self._cpus(service), "GPU": share}
        nodes = self._engine.tensor_parallel // share
        name = self._name(service.name)
        self._groups.append(placement_group([bundle] * nodes, strategy="PACK", name=name))
        seats: list[RaySeat] = []
        for node in range(nodes):
            place = PlacementGroupSchedulingStrategy(self._groups[-1], placement_group_bundle_index=node)
            own = {} if node else keys
            actor = self._make_actor(service, f"{service.name}/{node}", share, own, share, place)
            seats += [RaySeat(actor, number) for number in range(share)]
        return seats

    def _name(self, name: str) -> str:
        return f"{NAMESPACE}/{self.ring}/{name}"

    def _make_actor(
        self,
        service: Service,
        name: str,
        gpus: int,
        keys: Mapping[str, bytes],
        seats: int = 1,
        place: PlacementGroupSchedulingStrategy | None = None,
    ) -> Any:
        own = {name: content for name, content in keys.items() if _may_read(service.role, name)}
        actor = (
            ray.remote(SeatActor)
            .options(
                name=self._name(name),
                namespace=NAMESPACE,
                num_cpus=self._cpus(service),
                num_gpus=gpus,
                max_restarts=-1,
                runtime_env={"env_vars": remote_environment()},
                scheduling_strategy=place or "DEFAULT",
            )
            .remote(own, seats)
        )
        self._actors.append(actor)
        return actor


def _make_keys() -> dict[str, bytes]:
    """Of all roles, by path in the folder of keys."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for role in ROLES:
            generate(folder, role)
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.glob("*/*.key")}


def _may_read(role: str, name: str) -> bool:
    return not name.startswith("secret/") or name == f"secret/{role}.key"


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Ray's `init` replaces the handler of SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
