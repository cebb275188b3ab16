"""Every service restarted, one after the other, then an engine that stands still: what streams notice of it."""

import asyncio
from pathlib import Path

import msgspec

from bench.deaths.asked import mixed
from bench.deaths.frozen import Frozen, freeze
from bench.deaths.left import Left, left
from bench.deaths.played import Played
from bench.deaths.result import Tally
from bench.deaths.run import ENGINE, PEER_SECONDS, RESUME_SECONDS
from bench.deaths.streams import undisturbed, without_pause
from bench.deaths.tell import CALLBACK, Heard
from bench.rounds import Step
from bench.stats import thinned
from sluice import AsyncClient
from sluice.launch import Ring

QUIET, RESTARTS, STOPPED, GOES_ON = "undisturbed", "rolling restart", "an engine stands still", "it goes on"
LOOK_SECONDS = 0.01


class Plan(msgspec.Struct, frozen=True):
    """How much of it."""

    streams: int = 32
    """At a time."""
    max_tokens: int = 200
    routers: int = 2
    engines: int = 2
    detokenizers: int = 3
    drain_timeout: float = 3.0
    stopped_seconds: float = 30.0
    after_seconds: float = 10.0
    """That streams go on at least when the engine does."""
    threads: int = 1
    """Of each engine."""

    @property
    def steps(self) -> int:
        """Streams before, services, a stop and an end."""
        return self.streams + self.routers + self.engines + self.detokenizers + 2


class Restart(msgspec.Struct, frozen=True):
    """Of one service. Seconds."""

    service: str
    drain: float
    """From the call until its process had ended."""
    back: float
    """From then until the next one served, and all routers knew."""
    ending: str
    """How the process ended."""


class Phase(msgspec.Struct, frozen=True):
    """Streams that ended in it. Times in seconds, lists of them sorted and of at most a thousand."""

    name: str
    seconds: float
    streams: int
    failed: int
    wrong: int
    """Differ from the undisturbed run, errors included."""
    repeated: int
    """Brought something twice."""
    resumed: int
    """Had to go on at another router."""
    first: list[float]
    """To the first token."""
    stall: list[float]
    """Longest pause of each."""
    faults: list[str]
    """The first few, in words."""


class Result(msgspec.Struct, frozen=True):
    """What was noticed."""

    plan: Plan
    peer_seconds: float
    """Of silence, after which a service is taken for dead."""
    phases: list[Phase]
    restarts: list[Restart]
    frozen: Frozen
    left: Left
    """In the end."""


def measure(plan: Plan, _: Path, step: Step) -> Result:
    """In one ring. Raises ValueError where the launcher would end the frozen engine."""
    heard = Heard()
    with Ring(
        engines=plan.engines,
        detokenizers=plan.detokenizers,
        routers=plan.routers,
        drain_timeout=plan.drain_timeout,
        engine_args={**ENGINE, "threads": plan.threads, "stats_callback": CALLBACK},
        router_args={"peer_timeout": PEER_SECONDS},
        observe=heard,
    ) as ring:
        if plan.stopped_seconds >= ring.plan.freeze_timeout:
            raise ValueError(
                f"stopped_seconds is {plan.stopped_seconds:g}: after {ring.plan.freeze_timeout:g} s without a turn of "
                "its loop an engine is started again"
            )
        return asyncio.run(_measure(ring, heard, plan, step))


async def _measure(ring: Ring, heard: Heard, plan: Plan, step: Step) -> Result:
    asked = mixed(plan.streams, plan.max_tokens)
    phases = _Phases()

    def goes_on() -> None:
        phases.begin(GOES_ON)
        step(STOPPED)

    async with AsyncClient(ring.addresses, resume_timeout=RESUME_SECONDS, retry_timeout=RESUME_SECONDS) as client:
        quiet = await undisturbed(client, asked, lambda: step(QUIET))
        for found in quiet:
            phases.add(found, found)
        phases.begin(RESTARTS)
        restarting = asyncio.create_task(_restart_all(ring, step))
        await without_pause(client, asked, quiet, restarting, phases.add)
        phases.begin(STOPPED)
        name = next(name for name, child in ring.children.items() if child.role == "engine")
        seconds = (plan.stopped_seconds, plan.after_seconds)
        freezing = asyncio.create_task(freeze(ring, heard, name, *seconds, goes_on))
        await without_pause(client, asked, quiet, freezing, phases.add)
        ended = phases.end()
        step(GOES_ON)
        return Result(plan, PEER_SECONDS, ended, await restarting, await freezing, await left(client, ring))


async def _restart_all(ring: Ring, step: Step) -> list[Restart]:
    found = []
    for name in ring.children:
        found.append(await _restart(ring, name))
        step(f"{name} restarted")
    return found


async def _restart(ring: Ring, name: str) -> Restart:
    clock = asyncio.get_running_loop().time
    child, began = ring.children[name], clock()
    restarting = asyncio.create_task(asyncio.to_thread(ring.restart, name))
    while child.alive and not restarting.done():
        await asyncio.sleep(LOOK_SECONDS)
    ended = clock()
    await restarting
    return Restart(name, round(ended - began, 3), round(clock() - ended, 3), child.ending)


class _Phases:
    """One after the other, each with the streams that ended in it."""

    def __init__(self) -> None:
        self._found: list[Phase] = []
        self._enter(QUIET)

    def add(self, found: Played, truth: Played) -> None:
        """A stream has ended."""
        self._tally.add(found, truth)

    def begin(self, name: str) -> None:
        """The one before has ended."""
        self.end()
        self._enter(name)

    def end(self) -> list[Phase]:
        """All of them."""
        tally, seconds = self._tally, asyncio.get_running_loop().time() - self._began
        self._found.append(
            Phase(
                self._name,
                round(seconds, 2),
                tally.streams,
                tally.failed,
                tally.wrong,
                tally.repeated,
                tally.resumed,
                thinned(tally.first),
                thinned(tally.stall),
                tally.faults,
            )
        )
        return self._found

    def _enter(self, name: str) -> None:
        self._name, self._tally, self._began = name, Tally(), asyncio.get_running_loop().time()
