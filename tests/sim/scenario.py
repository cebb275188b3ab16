"""One seed: some requests, some faults, a ring. The same requests undisturbed are the truth."""

import asyncio
from dataclasses import dataclass
from random import Random
from random import seed as seed_all

from sluice.v1 import generation_pb2 as pb
from tests.fakes.runner import VOCAB
from tests.sim.clients import SimClient, Story
from tests.sim.loop import VirtualLoop
from tests.sim.network import Network, Weather
from tests.sim.services import Process, SimDetokenizer, SimEngine, SimRouter
from tests.sim.world import simulated

ROUTERS, ENGINES, DETOKENIZERS = ("router-0", "router-1"), ("engine-0", "engine-1"), ("detok-0", "detok-1", "detok-2")
NAMES = (*ROUTERS, *ENGINES, *DETOKENIZERS)
LIMIT_SECONDS = 400.0
SETTLE_SECONDS = 65.0
"""After the last stream: whoever was left behind is forgotten by then."""
STOPS = ("end", "stop", "日本", "aba")


@dataclass(frozen=True)
class Fault:
    """Something that happens at a time."""

    at: float
    what: str
    target: str
    seconds: float
    part: float = 1.0


@dataclass(frozen=True)
class Scenario:
    """All that is drawn from a seed."""

    seed: int
    policy: str
    overlap: bool
    requests: list[tuple[float, float, pb.GenerationSpec]]
    """When, how slowly it is read, what."""
    faults: list[Fault]

    @classmethod
    def of(cls, number: int) -> "Scenario":
        random = Random(number)
        policy = random.choice(("max_utilization", "max_utilization", "guaranteed_no_evict", "static_batch"))
        requests = [_request(random) for _ in range(random.randint(2, 7))]
        count = sum(random.random() < 0.5 for _ in range(6))
        return cls(number, policy, random.random() < 0.3, requests, [_fault(random) for _ in range(count)])

    def play(self, disturbed: bool) -> "Outcome":
        loop = VirtualLoop()
        network = Network(Random(self.seed + 1))
        seed_all(self.seed)
        try:
            with simulated(network, loop):
                return loop.run_until_complete(_Play(self, network).run(self.faults if disturbed else []))
        finally:
            loop.close()


@dataclass(frozen=True)
class Outcome:
    """What clients were told, and what was left behind."""

    stories: list[Story]
    left: list[str]
    faults: int
    """Carried out."""
    harmed: int
    """Frames."""
    resumed: int
    """Attempts that clients and routers began again."""


def _request(random: Random) -> tuple[float, float, pb.GenerationSpec]:
    spec = pb.GenerationSpec()
    shared = [7 * i % VOCAB for i in range(random.choice((0, 6, 12)))]
    spec.token_ids.ids.extend([*shared, *(random.randrange(VOCAB) for _ in range(random.randint(1, 8)))])
    spec.n = random.choice((1, 1, 1, 2, 3))
    spec.sampling.seed = random.getrandbits(32)
    spec.sampling.temperature = 1.0
    spec.stopping.max_tokens = random.choice((1, 5, 20, 40, 60))
    spec.stopping.ignore_eos = True
    if random.random() < 0.4:
        spec.stopping.stop.extend(random.sample(STOPS, random.randint(1, 3)))
        spec.stopping.min_tokens = min(spec.stopping.max_tokens, random.choice((0, 0, 3, 12)))
    if random.random() < 0.3:
        spec.stopping.stop_token_ids.extend(random.sample(range(VOCAB), 3))
    if random.random() < 0.2:
        spec.output.stream_interval = random.randint(2, 9)
    spec.output.token_ids = True
    slow = random.choice((0.0, 0.0, 0.0, 0.1))
    return random.uniform(0.0, 3.0) + 1.5, slow, spec


def _fault(random: Random) -> Fault:
    at = random.uniform(1.0, 6.0)
    what = random.choice(("kill", "kill", "kill", "freeze", "drain", "lose", "repeat", "delay", "reorder"))
    if what in ("kill", "drain"):
        return Fault(at, what, random.choice(NAMES), random.choice((0.3, 1.0, 5.0)))
    if what == "freeze":
        return Fault(at, what, random.choice((*ENGINES, *DETOKENIZERS)), random.choice((0.5, 3.0, 12.0)))
    target = random.choice(("*", *(f"ipc:///sim/{name}" for name in NAMES)))
    return Fault(at, what, target, random.choice((0.1, 0.5, 2.0)), random.choice((0.05, 0.3, 1.0)))


class _Play:
    def __init__(self, scenario: Scenario, network: Network) -> None:
        self._scenario = scenario
        self._network = network
        self._processes: dict[str, Process] = {}
        self._carried_out = 0

    async def run(self, faults: list[Fault]) -> Outcome:
        for name in NAMES:
            self._begin(name)
        acting = [asyncio.ensure_future(self._act(fault)) for fault in faults]
        random = Random(self._scenario.seed + 2)
        clients = [
            SimClient(spec, at, slow, Random(random.random()), self._routers)
            for at, slow, spec in self._scenario.requests
        ]
        async with asyncio.timeout(LIMIT_SECONDS):
            await asyncio.gather(*(client.run() for client in clients), *acting)
        await asyncio.sleep(SETTLE_SECONDS if faults else 2.0)
        resumed = sum(client.story.resumed for client in clients) + self._network.attempts
        left = [found for name, process in self._processes.items() for found in left_behind(name, process)]
        for process in self._processes.values():
            process.kill()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        return Outcome([client.story for client in clients], left, self._carried_out, self._network.harmed, resumed)

    def _routers(self) -> list[SimRouter | None]:
        found = [self._processes[name] for name in ROUTERS]
        return [each if each.alive and not each.ended else None for each in found]

    def _begin(self, name: str) -> None:
        network = self._network
        if name in ENGINES:
            self._processes[name] = SimEngine(network, name, self._scenario.policy, self._scenario.overlap)
        elif name in DETOKENIZERS:
            self._processes[name] = SimDetokenizer(network, name)
        else:
            peers = [tuple(f"ipc:///sim/{peer}" for peer in kind) for kind in (ENGINES, DETOKENIZERS)]
            self._processes[name] = SimRouter(network, name, *peers)

    async def _act(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        self._carried_out += 1
        if fault.what in ("lose", "repeat", "delay", "reorder"):
            until = asyncio.get_running_loop().time() + fault.seconds
            self._network.weather.append(Weather(fault.what, fault.target, until, fault.part))
            return
        process = self._processes[fault.target]
        if fault.what == "freeze":
            process.freeze()
            await asyncio.sleep(fault.seconds)
            process.thaw()
            return
        if fault.what == "drain" and process.alive:
            process.drain()
            while process.alive and not process.ended:
                await asyncio.sleep(0.1)
        if process.alive:
            process.kill()
            await asyncio.sleep(fault.seconds)
            self._begin(fault.target)


def left_behind(name: str, process: Process) -> list[str]:
    """What a ring without requests must not hold."""
    found: dict[str, int] = {}
    if isinstance(process, SimEngine):
        engine = process.worker._engine
        engine.check()
        pool = engine._cache.pool
        found = {
            "requests": len(engine.live.requests),
            "blocks": pool.num_blocks - pool.available,
            "streams": len(process.worker._mailbox._streams),
            "violations": len(process.runner.violations),
        }
    elif isinstance(process, SimDetokenizer):
        found = {"streams": process.service.streams, "waiting": process.service.waiting}
    elif isinstance(process, SimRouter):
        router = process.router
        found = {
            "open": len(router._requests.open),
            "on ring": len(router._requests.on_ring),
            "permits": router._admission.live,
            "waiting": router._admission.waiting,
            "recoveries": router._dispatcher._recovery.waiting,
        }
    return [f"{name} holds {count} {what}" for what, count in found.items() if count]


def judge(scenario: Scenario) -> tuple[list[str], Outcome]:
    """What went wrong, in words."""
    truth, found = scenario.play(False), scenario.play(True)
    wrong = [f"undisturbed: {fault}" for story in truth.stories for fault in story.faults]
    for number, (story, true) in enumerate(zip(found.stories, truth.stories, strict=True)):
        wrong += [f"request {number}: {fault}" for fault in story.faults]
        for what in ("tokens", "text", "ends", "usage"):
            here, there = getattr(story, what), getattr(true, what)
            if not story.faults and here != there:
                wrong.append(f"request {number}: {what} {here} for {there}")
    return wrong + found.left + [f"undisturbed: {left}" for left in truth.left], found
