"""Runs each service in an actor of a Ray cluster. Ray places and restarts actors; tokens do not pass through Ray.

Only this module and `sluice/launch/ray_job.py` import ray.
"""

import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sluice.lanes.keys import ROLES, generate
from sluice.launch.environment import remote_environment
from sluice.launch.errors import OptionsError, RingError
from sluice.launch.gpus import ranks_of, ranks_per_node
from sluice.launch.hosts.agent import Agent
from sluice.launch.hosts.hosts import Child, Peers
from sluice.launch.hosts.rank_group import RankGroup
from sluice.launch.hosts.remote_child import AgentLostError, AgentUnavailableError, RemoteChild, RemoteStatus
from sluice.launch.logs import LogLine, Observe
from sluice.launch.plan import PYTHON, Plan, Service, services
from sluice.settings.process import is_loopback
from sluice.settings.services import EngineSettings
from sluice.telemetry.service_status import StatusSource

NAMESPACE = "sluice"
CLOSE_SECONDS = 10.0
POLL_SECONDS = 0.5


class AgentActor:
    """The agents on one node. Calls run one at a time in the main thread of the actor's process."""

    def __init__(self, keys: Mapping[str, bytes], agents: int) -> None:
        """`keys`: those of the first agent. The others run ranks that are no peers on the ring and need no keys."""
        address = ray.util.get_node_ip_address()
        self._agents = [Agent(address, {} if number else keys) for number in range(agents)]

    def call(self, agent: int, method: str, *arguments: Any) -> Any:
        return getattr(self._agents[agent], method)(*arguments)

    def close(self) -> None:
        for agent in self._agents:
            agent.close()


class RayAgent:
    """A `RemoteAgent` in an actor."""

    def __init__(self, actor: Any, number: int = 0) -> None:
        """`number`: index among the agents of the actor."""
        self._actor = actor
        self._number = number
        self._closed = threading.Event()

    def call(self, method: str, *arguments: Any) -> Any:
        answer = self._actor.call.remote(self._number, method, *arguments)
        try:
            # While the cluster is full, the actor waits for a node.
            while not ray.wait([answer], timeout=POLL_SECONDS)[0]:
                if self._closed.is_set():
                    raise AgentLostError("the ring has ended")
            return ray.get(answer)
        except ActorUnavailableError as error:
            raise AgentUnavailableError(str(error)) from error
        except RayActorError as error:
            raise AgentLostError(" ".join(str(error).split())) from error

    def send(self, method: str, *arguments: Any) -> None:
        if not self._closed.is_set():
            with suppress(RayError):
                self._actor.call.remote(self._number, method, *arguments)

    def close(self) -> None:
        """End the calls that wait for an answer."""
        self._closed.set()


class RayHosts:
    """The `Hosts` of a Ray cluster. Owns the actors, the ring's keys, and the connection if it has opened it."""

    def __init__(self, plan: Plan, engine: EngineSettings, address: str) -> None:
        """`address`: that of the cluster. Empty: Ray uses RAY_ADDRESS, a cluster on this machine, or starts one."""
        if is_loopback(plan.host):
            raise OptionsError(
                f"host {plan.host}: on Ray, routers run on other machines. Use host 0.0.0.0, which means the address "
                "of the router's node, with tls_certificate and tls_key, or with insecure"
            )
        self.ring = f"{Path(plan.name).name}-{secrets.token_hex(3)}"
        """The actors' names begin with sluice/RING/."""
        self._plan = plan
        self._engine = engine
        self._address = address
        self._connected = False
        self._max_gpus_per_node: int | None = None
        """Number of GPUs of the largest node when the ring started."""
        self._actors: list[Any] = []
        self._groups: list[Any] = []
        """Ray's placement groups of engines on several nodes."""
        self._agents: dict[str, list[RayAgent]] = {}
        """The agents of each service: one, or for an engine on several nodes one per rank."""
        self._status: dict[str, RemoteStatus] = {}
        self._peers: Peers = {}

    @property
    def remarks(self) -> Sequence[LogLine]:
        return ()

    def open(self) -> list[Service]:
        self._connect()
        planned = [self._with_shares(service) for service in services(self._plan, Path())]
        gpus = self._gpus_per_node()
        keys = _generate_keys() if self._plan.keys is None and not self._engine.insecure_ring else {}
        for service in planned:
            self._status[service.name] = RemoteStatus()
            if service.role == "engine" and self._engine.tensor_parallel > gpus > 0:
                self._agents[service.name] = self._agents_of_ranks(service, gpus, keys)
            else:
                actor = self._create_actor(service, service.name, gpus if service.role == "engine" else 0, keys)
                self._agents[service.name] = [RayAgent(actor)]
        return planned

    def status(self, name: str) -> StatusSource:
        return self._status[name]

    def start(self, service: Service, observe: Observe, ended: Callable[[Child], None]) -> Child:
        # The path of this machine's interpreter means nothing on the actor's machine, which uses its own.
        sent = replace(service, python=()) if service.python == PYTHON else service
        agents, status = self._agents[service.name], self._status[service.name]
        if len(agents) > 1:
            ranks = ranks_of(len(agents), self._gpus_per_node())
            return RankGroup(sent, ranks, agents, status, observe, ended)
        return RemoteChild(sent, agents[0], status, observe, ended, lambda: self._peers)

    def discard(self, name: str) -> None:
        """Does nothing: the KV caches are in private memory, or in a folder that the user has chosen."""

    def announce(self, peers: Peers) -> None:
        self._peers = peers
        for name, agents in self._agents.items():
            if name.startswith("router"):
                agents[0].send("announce", peers)

    def release_ports(self) -> None:
        """Does nothing: services on a Ray cluster share no ports."""

    def close(self) -> None:
        if not self._connected:
            return
        self._connected = False
        for agent in chain.from_iterable(self._agents.values()):
            agent.close()
        with suppress(RayError):
            closed = [actor.close.remote() for actor in self._actors]
            if closed:
                # Wait until the actors have removed their folders. Actors without a node do not answer.
                ray.wait(closed, num_returns=len(closed), timeout=CLOSE_SECONDS)
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor, no_restart=True)
        for group in self._groups:
            with suppress(RayError):
                remove_placement_group(group)
        if self._owns_connection:
            ray.shutdown()

    def _connect(self) -> None:
        # If the program has connected to Ray already, the program owns the connection.
        self._owns_connection = not ray.is_initialized()
        if self._owns_connection:
            try:
                with _preserved_signal_handlers():
                    ray.init(self._address or None, namespace=NAMESPACE, log_to_driver=False, logging_level="WARNING")
            except (RayError, OSError, RuntimeError, ValueError) as error:
                raise RingError(f"no Ray cluster at {self._address or 'its default address'}: {error}") from error
        self._connected = True

    def _with_shares(self, service: Service) -> Service:
        """The service with the share of its node that its actor reserves, instead of a share of this machine."""
        if service.role != "engine":
            return service
        shares = {"default_threads": max(1, int(self._cpus(service))), "engines_per_gpu": 1}
        return replace(service, arguments={**service.arguments, **shares})

    def _cpus(self, service: Service) -> float:
        return float(self._engine.threads or 1) if service.role == "engine" else 1.0

    def _gpus_per_node(self) -> int:
        """Number of GPUs that an engine reserves on each of its nodes."""
        if self._max_gpus_per_node is None:
            gpus = [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]
            self._max_gpus_per_node = int(max(gpus, default=0))
        ranks = self._engine.tensor_parallel
        if self._engine.device == "cpu" or (self._engine.device == "auto" and not self._max_gpus_per_node):
            return 0
        return ranks_per_node(ranks, self._max_gpus_per_node or ranks)

    def _agents_of_ranks(self, service: Service, per_node: int, keys: Mapping[str, bytes]) -> list[RayAgent]:
        """The agents of an engine with `per_node` ranks on each of several nodes, which are reserved together."""
        bundle = {"CPU": self._cpus(service), "GPU": per_node}
        nodes = self._engine.tensor_parallel // per_node
        name = self._name(service.name)
        self._groups.append(placement_group([bundle] * nodes, strategy="PACK", name=name))
        agents: list[RayAgent] = []
        for node in range(nodes):
            strategy = PlacementGroupSchedulingStrategy(self._groups[-1], placement_group_bundle_index=node)
            node_keys = {} if node else keys
            actor = self._create_actor(service, f"{service.name}/{node}", per_node, node_keys, per_node, strategy)
            agents += [RayAgent(actor, number) for number in range(per_node)]
        return agents

    def _name(self, name: str) -> str:
        return f"{NAMESPACE}/{self.ring}/{name}"

    def _create_actor(
        self,
        service: Service,
        name: str,
        gpus: int,
        keys: Mapping[str, bytes],
        agents: int = 1,
        strategy: PlacementGroupSchedulingStrategy | None = None,
    ) -> Any:
        readable_keys = {path: content for path, content in keys.items() if _may_read(service.role, path)}
        actor = (
            ray.remote(AgentActor)
            .options(
                name=self._name(name),
                namespace=NAMESPACE,
                num_cpus=self._cpus(service),
                num_gpus=gpus,
                max_restarts=-1,
                runtime_env={"env_vars": remote_environment()},
                scheduling_strategy=strategy or "DEFAULT",
            )
            .remote(readable_keys, agents)
        )
        self._actors.append(actor)
        return actor


def _generate_keys() -> dict[str, bytes]:
    """New keys for all roles, by path in the folder of keys."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for role in ROLES:
            generate(folder, role)
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.glob("*/*.key")}


def _may_read(role: str, path: str) -> bool:
    """Whether services of this role need the key file: all public keys, and the role's own secret key."""
    return not path.startswith("secret/") or path == f"secret/{role}.key"


@contextmanager
def _preserved_signal_handlers() -> Iterator[None]:
    """Restores the handler of SIGTERM, which Ray's `init` replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
