"""Streams without pause over a ring whose services are killed at random: in quick succession, and as a soak."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import replace

from bench.deaths.streams import (
    ENGINE,
    MIXED,
    PEER_SECONDS,
    StreamCounter,
    StreamTotals,
    connect,
    mixed,
    undisturbed,
    without_pause,
)
from bench.harness.memory import MemoryWatch, Trail, before_and_after, slope
from bench.harness.stats import percentile, thinned
from bench.harness.style import BLUE, FAINT, GREY, ORANGE, ROLES, Series, canvas, distribution, frame, trails
from bench.harness.tables import Section, Table, number, table
from bench.harness.topic import Step, Topic
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
    """Seconds since the first stream was disturbed."""

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


async def kill(ring: Ring, plan: KillPlan, on_kill: Callable[[], None]) -> list[Death]:
    """SIGKILL to random services, each role as often as the others, whatever the state of the ring."""
    deaths: list[Death] = []
    began, source = time.monotonic(), random.Random(plan.seed)
    for _ in range(plan.kills):
        await asyncio.sleep(source.uniform(0.5, 1.5) * plan.seconds_between)
        role = source.choice(("router", "engine", "detok"))
        while not (alive := [c for c in ring.children.values() if c.role == role and c.alive]):
            await asyncio.sleep(POLL_SECONDS)
        child = source.choice(alive)
        # It may have died by itself between the look and the kill; then it does not count.
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
            deaths.append(Death(child.name, round(time.monotonic() - began, 2)))
        on_kill()
    return deaths


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
        killing = asyncio.create_task(kill(ring, plan, lambda: step("streams run, services die")))
        await without_pause(client, asked, quiet, killing, counter.add)
        deaths = await killing
        seconds = time.monotonic() - began
        watching.cancel()
        watch.sample()
    return KillResult(
        plan=plan,
        deaths=deaths,
        quiet_seconds=began - watch.began,
        seconds=seconds,
        quiet_first=thinned([found.first_token for found in quiet]),
        quiet_stall=thinned([found.stall for found in quiet]),
        memory=watch.trails,
        **counter.totals(),
    )


WARM_SECONDS: Mapping[str, float] = {"router": 30.0, "engine": 180.0, "detok": 30.0}
"""Warm-up of a process by role, in which its memory may grow: a KV block takes memory once it is first written."""
NAMES = {"router": "Routers", "engine": "Engines", "detok": "Detokenizers"}


def section(result: KillResult) -> Section:
    plan = result.plan
    return Section(
        "Streams while services die",
        f"{plan.streams} streams without pause: {MIXED}, through {plan.routers} routers, {plan.engines} engines "
        f"and {plan.detokenizers} detokenizers, of which a random one gets SIGKILL every {plan.seconds_between:g} s. "
        "Each is compared with its undisturbed run: text, token ids, logprobs, finish reason, usage.",
        [_answer(result)],
        [_pauses(result), _memory(result)],
    )


def soak_section(result: KillResult) -> Section:
    return Section(
        "Soak",
        f"The same load for {result.seconds / 60:.3g} minutes, with a death every {result.plan.seconds_between:g} s. "
        f"*Growth* is the slope of a process's memory over its life after its first {WARM_SECONDS['router']:g} s "
        f"(an engine's {WARM_SECONDS['engine']:g} s, for the KV cache takes memory once it is first written), over all "
        "processes of this service.",
        [_answer(result), *([_growth(result)] if _slopes(result) else [])],
        [_pauses(result), _memory(result)],
    )


def summary(result: KillResult) -> str:
    waits = "; ".join(
        f"{name} p50 {percentile(times, 50):.2f} s, p99 {percentile(times, 99):.2f} s "
        f"(undisturbed {percentile(quiet, 50):.2f}, {percentile(quiet, 99):.2f})"
        for name, times, quiet in (
            ("first token", result.first, result.quiet_first),
            ("longest pause", result.stall, result.quiet_stall),
        )
    )
    return f"{_answer(result)} {waits}"


def soak_summary(result: KillResult) -> str:
    slopes = ", ".join(f"{name} {growth:+.2f}" for name, growth in _slopes(result).items())
    return (
        f"{result.seconds / 60:.1f} min, {len(result.deaths)} deaths: {result.streams} streams, "
        f"{result.failed} failed, {result.wrong} wrong; MiB per minute after warm-up: {slopes or 'too short to say'}"
    )


def _answer(result: KillResult) -> str:
    killed = ", ".join(f"{count} of {role}" for role, count in result.killed.items())
    return (
        f"{len(result.deaths)} kills ({killed}) in {result.seconds:.0f} s: {result.streams} streams, "
        f"**{result.failed} failed, {result.wrong} wrong**; {result.resumed} went on at another router."
    )


def _growth(result: KillResult) -> str:
    slopes = _slopes(result)
    most = max(slopes, key=slopes.__getitem__)
    return f"After warm-up no service grows by more than **{slopes[most]:.2f} MiB per minute** ({most})."


def _pauses(result: KillResult) -> Table:
    rows = []
    for name, first, stall in (
        ("undisturbed", result.quiet_first, result.quiet_stall),
        ("services die", result.first, result.stall),
    ):
        cells = [number(1000 * percentile(times, p)) for times in (first, stall) for p in (50, 99)]
        rows.append(" | ".join([name, *cells]))
    return table("ms | first token p50 | first token p99 | longest pause p50 | longest pause p99", rows)


def _memory(result: KillResult) -> Table:
    slopes = _slopes(result)
    rows = []
    for service, (before, after) in sorted(before_and_after(result.memory, result.quiet_seconds).items()):
        lives = [trail.mebibytes for trail in result.memory if trail.service == service]
        cells = map(number, (before, after, max(map(max, lives)), slopes.get(service)))
        rows.append(" | ".join([service, str(len(lives)), *cells]))
    return table("memory, MiB | processes | before | at the end | at most | growth per minute", rows)


def _slopes(result: KillResult) -> dict[str, float]:
    """MiB per minute by service, without services that never outlived their warm-up."""
    found = {}
    for service in sorted({trail.service for trail in result.memory}):
        warm = WARM_SECONDS[service.partition("-")[0]]
        lives = [trail.after(warm) for trail in result.memory if trail.service == service]
        growth = slope([trail for trail in lives if trail.seconds])
        if growth is not None:
            found[service] = growth
    return found


def draw(result: KillResult) -> Figure:
    figure, ((first, stall),) = canvas(
        (1, 2), (12, 4.8), "Services die, streams go on", "Each stream's longest wait, as a distribution."
    )
    for axes, name, quiet, killed in (
        (first, "First token", result.quiet_first, result.first),
        (stall, "Longest pause", result.quiet_stall, result.stall),
    ):
        distribution(axes, name, "s", [Series("undisturbed", BLUE, quiet), Series("services die", ORANGE, killed)])
    return figure


def draw_soak(result: KillResult) -> Figure:
    roles = [role for role in ROLES if any(trail.role == role for trail in result.memory)]
    figure, grid = canvas((len(roles), 1), (12, 2.2 * len(roles) + 1), "Memory stays constant", "A line: a death.")
    for (axes,), role in zip(grid, roles, strict=True):
        trails(axes, [trail for trail in result.memory if trail.role == role])
        for death in result.deaths:
            colour = GREY if death.role == role else FAINT
            axes.axvline((death.at + result.quiet_seconds) / 60, color=colour, linewidth=0.9, zorder=0)
        frame(axes, f"{NAMES[role]}, MiB", x="minutes", grid="y")
    return figure


TOPIC = Topic(plan, measure, KillResult, section, draw)
SOAK = Topic(soak_plan, measure, KillResult, soak_section, draw_soak)
