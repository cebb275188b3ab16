"""Streams without pause over a ring whose services are killed at random: in quick succession, and as a soak."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from bench.deaths.streams import (
    ENGINE,
    PEER_SECONDS,
    StreamCounter,
    StreamTotals,
    connect,
    mixed,
    undisturbed,
    without_pause,
)
from bench.harness.memory import MemoryWatch, Trail
from bench.harness.stats import thinned
from bench.harness.topic import Step
from sluice.launch import Ring

POLL_SECONDS = 0.05


class KillPlan(msgspec.Struct, frozen=True):
    streams: int = 64
    kills: int = 50
    seconds_between: float = 2.0
    max_tokens: int = 200
    routers: int = 2
    engines: int = 2
    detokenizers: int = 3
    seed: int = 0
    threads: int = 1

    @property
    def steps(self) -> int:
        return self.streams + self.kills


class Death(msgspec.Struct, frozen=True):
    service: str
    at: float
    """Seconds since the killer was created."""

    @property
    def role(self) -> str:
        return self.service.partition("-")[0]


class KillResult(StreamTotals, frozen=True, kw_only=True):
    plan: KillPlan
    deaths: list[Death]
    quiet_seconds: float
    """On the memory trails' clock: when streams began to be disturbed."""
    seconds: float
    quiet_first: list[float]
    quiet_stall: list[float]
    memory: list[Trail]

    @property
    def killed(self) -> dict[str, int]:
        return dict(sorted(Counter(death.role for death in self.deaths).items()))


def plan(quick: bool, threads: int, _: Path) -> KillPlan:
    made = KillPlan(8, 3, max_tokens=60) if quick else KillPlan()
    return replace(made, threads=max(1, threads // made.engines))


def soak_plan(quick: bool, threads: int, folder: Path) -> KillPlan:
    return soak_of(0.1 if quick else 30.0, 5.0 if quick else 20.0, plan(quick, threads, folder))


def soak_of(minutes: float, every: float, plan: KillPlan, **others: int) -> KillPlan:
    """A death every `every` seconds; the rest as in `plan`, except for `others`."""
    return replace(plan, **others, kills=max(1, round(60 * minutes / every)), seconds_between=every)


class Killer:
    """Sends SIGKILL to random services, whatever the state of the ring."""

    def __init__(self, ring: Ring, seed: int) -> None:
        self.deaths: list[Death] = []
        self._began = time.monotonic()
        self._ring = ring
        self._random = random.Random(seed)

    async def run(self, kills: int, seconds: float, on_kill: Callable[[], None]) -> None:
        """`seconds` apart on average, each role as often as the others."""
        for _ in range(kills):
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * seconds)
            await self._kill(self._random.choice(("router", "engine", "detok")))
            on_kill()

    async def _kill(self, role: str) -> None:
        while not (alive := [c for c in self._ring.children.values() if c.role == role and c.alive]):
            await asyncio.sleep(POLL_SECONDS)
        child = self._random.choice(alive)
        # It may have died by itself between the look and the kill; then it does not count.
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
            self.deaths.append(Death(child.name, round(time.monotonic() - self._began, 2)))


def measure(plan: KillPlan, _: Path, step: Step) -> KillResult:
    with Ring(
        engines=plan.engines,
        detokenizers=plan.detokenizers,
        routers=plan.routers,
        engine_args={**ENGINE, "threads": plan.threads},
        router_args={"peer_timeout": PEER_SECONDS},
    ) as ring:
        return asyncio.run(_measure(ring, plan, step))


async def _measure(ring: Ring, plan: KillPlan, step: Step) -> KillResult:
    asked = mixed(plan.streams, plan.max_tokens)
    watch, counter = MemoryWatch(ring), StreamCounter()
    async with connect(ring.addresses) as client:
        watching = asyncio.create_task(watch.run())
        quiet = await undisturbed(client, asked, lambda: step("undisturbed"))
        began = time.monotonic()
        killer = Killer(ring, plan.seed)
        on_kill = lambda: step("streams run, services die")  # noqa: E731
        killing = asyncio.create_task(killer.run(plan.kills, plan.seconds_between, on_kill))
        await without_pause(client, asked, quiet, killing, counter.add)
        await killing
        seconds = time.monotonic() - began
        watching.cancel()
        watch.sample()
    return KillResult(
        plan=plan,
        deaths=killer.deaths,
        quiet_seconds=began - watch.began,
        seconds=seconds,
        quiet_first=thinned([found.first_token for found in quiet]),
        quiet_stall=thinned([found.stall for found in quiet]),
        memory=watch.trails,
        **counter.totals(),
    )
