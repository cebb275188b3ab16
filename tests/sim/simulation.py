"""One run of a scenario: starts the services and clients, carries out the faults, and collects the results."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from sluice.wire.heartbeats import Phase
from tests.sim.clients import ClientPlan, SimClient, Transcript
from tests.sim.inputs import DETOKENIZERS, ENGINES, NAMES, ROUTERS, Fault
from tests.sim.network import Disturbance, Network
from tests.sim.services import Poison, Process, SimDetokenizer, SimEngine, SimRouter

LIMIT_SECONDS = 400.0
REST_SECONDS, SETTLE_SECONDS = 10.0, 65.0
"""After the last stream: late messages have arrived after the first; remaining state has expired after both."""


@dataclass(frozen=True)
class Outcome:
    """The streams that clients received, and the state that services still hold."""

    transcripts: list[Transcript]
    leftovers: list[str]
    faults: int
    """Faults that had an effect while there were streams."""
    harmed: int
    """Frames that were lost, delayed or repeated."""
    resumed: int
    """Attempts after the first, of clients and of routers."""
    handovers: int = 0
    """Attempts that were to hand over."""
    poison_deaths: int = 0
    copied: int = 0
    """Blocks that engines copied from each other's files."""


class Simulation:
    """A ring with its clients and faults."""

    def __init__(
        self,
        network: Network,
        policy: str,
        overlap: bool,
        weights: Mapping[str, tuple[int, int]],
        poison: Poison | None,
        phases: Mapping[str, Phase] = {},
        folder: Path | None = None,
    ) -> None:
        """`weights`: of each engine, at first and after a restart. `phases`: of engines, by name; the others have
        both. `folder`: for the engines' pool files."""
        self._network = network
        self._policy = policy
        self._overlap = overlap
        self._weights = weights
        self._poison = poison
        self._phases = phases
        self._folder = folder
        self._processes: dict[str, Process] = {}
        self._clients: list[SimClient] = []
        self._carried_out = 0
        self._poison_deaths = 0
        self._restarts: set[asyncio.Task] = set()
        self._disturbances: list[Disturbance] = []

    async def run(self, plans: Sequence[ClientPlan], faults: Sequence[Fault], random: Random) -> Outcome:
        """`random`: for the clients."""
        for name in NAMES:
            self._start(name)
        injecting = [asyncio.ensure_future(self._inject(fault)) for fault in faults]
        self._clients = [SimClient(plan, Random(random.random()), self._routers) for plan in plans]
        async with asyncio.timeout(LIMIT_SECONDS):
            await asyncio.gather(*(client.run() for client in self._clients), *injecting)
        leftovers = await self._settle(disturbed=bool(faults))
        transcripts = [client.transcript for client in self._clients]
        resumed = sum(transcript.resumed for transcript in transcripts) + self._network.attempts
        await self._stop_everything()
        carried_out = self._carried_out + sum(disturbance.harmed > 0 for disturbance in self._disturbances)
        harmed, handovers = self._network.harmed, self._network.handovers
        deaths, copied = self._poison_deaths, self._network.copied
        return Outcome(transcripts, leftovers, carried_out, harmed, resumed, handovers, deaths, copied)

    async def _stop_everything(self) -> None:
        for process in self._processes.values():
            process.kill()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _settle(self, *, disturbed: bool) -> list[str]:
        """Wait until no state is left, at most SETTLE_SECONDS. Returns what is left."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_SECONDS
        await asyncio.sleep(REST_SECONDS if disturbed else 2.0)
        while (leftovers := self._leftovers()) and disturbed and loop.time() < deadline:
            await asyncio.sleep(1.0)
        return leftovers

    def _leftovers(self) -> list[str]:
        return [leftover for name, process in self._processes.items() for leftover in leftovers_of(name, process)]

    def _routers(self) -> list[SimRouter | None]:
        routers = [self._processes[name] for name in ROUTERS]
        return [router if router.alive and not router.ended else None for router in routers]

    def _start(self, name: str) -> None:
        network = self._network
        if name in ENGINES:
            phase = self._phases.get(name, "both")
            on_killed, weights = partial(self._restart, name), self._weights[name][name in self._processes]
            self._processes[name] = SimEngine(
                network, name, self._policy, phase, self._overlap, weights, self._poison, on_killed, self._folder
            )
        elif name in DETOKENIZERS:
            self._processes[name] = SimDetokenizer(network, name)
        else:
            peers = [tuple(f"ipc:///sim/{peer}" for peer in kind) for kind in (ENGINES, DETOKENIZERS)]
            self._processes[name] = SimRouter(network, name, *peers)

    def _restart(self, name: str) -> None:
        """Called when the poison has killed an engine."""

        async def restart() -> None:
            process.kill()
            await asyncio.sleep(1.0)
            if self._processes[name] is process:
                self._start(name)

        process = self._processes[name]
        self._poison_deaths += 1
        task = asyncio.ensure_future(restart())
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _inject(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        if all(client.ended for client in self._clients):
            return
        if fault.kind in ("lose", "repeat", "delay", "reorder"):
            until = asyncio.get_running_loop().time() + fault.seconds
            self._disturbances.append(Disturbance(fault.kind, fault.target, until, fault.probability))
            self._network.disturbances.append(self._disturbances[-1])
            return
        process = self._processes[fault.target]
        self._carried_out += process.alive
        if fault.kind == "freeze":
            process.freeze()
            await asyncio.sleep(fault.seconds)
            process.thaw()
            return
        if fault.kind == "drain" and process.alive:
            process.drain()
            while process.alive and not process.ended:
                await asyncio.sleep(0.1)
        if process.alive:
            process.kill()
            await asyncio.sleep(fault.seconds)
            self._start(fault.target)


def leftovers_of(name: str, process: Process) -> list[str]:
    """State that a service still holds and that a ring without requests must not."""
    counts: dict[str, int] = {}
    if isinstance(process, SimEngine):
        engine = process.worker._engine
        engine.cache.check()
        pool = engine.cache.pool
        counts = {
            "requests": len(engine.live.requests),
            "blocks": pool.num_blocks - pool.available,
            "streams": len(process.worker._mailbox._submits),
            "tensors": process.worker._tensors.waiting,
            "rows": sum(len(peer.rows) + len(peer.opens) for peer in process.worker._outbox._peers.values()),
            "violations": len(process.runner.violations),
        }
    elif isinstance(process, SimDetokenizer):
        counts = {"streams": process.service.streams, "waiting": process.service.waiting}
    elif isinstance(process, SimRouter):
        router = process.router
        counts = {
            "open": len(router.ring.requests.open),
            "on ring": len(router.ring.requests.on_ring),
            "permits": router.ring.admission.live,
            "waiting": router.ring.admission.waiting,
            "recoveries": router.ring.dispatcher._recovery.waiting,
            "tenants": router.ring.admission.shares.tenants,
            "requests charged": sum(load.requests for load in router.ring.placement._engines.values()),
            "streams charged": sum(router.ring.placement._streams.values()),
            "cancels": sum(map(len, router.ring.dispatcher._attempts._cancels._unsent.values())),
        }
    return [f"{name} holds {count} {what}" for what, count in counts.items() if count]
