"""Continuous streams through a ring whose services are killed at random: in quick succession, and as a soak test."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import replace

from bench.deaths import adapters, images, qwen_vl, streams
from bench.deaths.requests import StreamRequest
from bench.deaths.rounding import count_rounded
from bench.harness.memory import MemoryWatch, Trail, before_and_after, slope
from bench.harness.pool_files import NOT_USED, folders
from bench.harness.stats import thinned
from bench.harness.style import BLUE, FAINT, GREY, ORANGE, ROLES, TEAL, Series, canvas, distribution, frame, trails
from bench.harness.tables import Section, Table, number, table
from bench.harness.topic import Step, Topic
from sluice.launch import Ring

POLL_SECONDS = 0.05


class KillPlan(streams.StreamsPlan, frozen=True):
    kills: int = 50
    seconds_between: float = 2.0
    seed: int = 0
    with_files: bool = False
    """Whether the run is without pool files, and followed by the same with them."""
    adapters: "KillPlan | None" = None
    """A second run, with adapters, in a separate ring; see `bench.deaths.adapters`."""
    images: "KillPlan | None" = None
    """A run with images; see `bench.deaths.images`."""
    qwen_vl: "KillPlan | None" = None
    """A run with images of several sizes; see `bench.deaths.qwen_vl`."""


class Death(msgspec.Struct, frozen=True):
    service: str
    at: float
    """Seconds since the first stream was disturbed."""

    @property
    def role(self) -> str:
        return self.service.partition("-")[0]


class KillResult(streams.StreamTotals, frozen=True, kw_only=True):
    plan: KillPlan
    deaths: list[Death]
    quiet_seconds: float
    """When the first stream was disturbed, on the clock of the memory trails."""
    seconds: float
    quiet_first: list[float]
    quiet_stall: list[float]
    memory: list[Trail]
    rounded: int = 0
    """Number of wrong streams that differ only by rounding."""
    in_files: bool = False
    """Whether the engines had pool files."""
    with_files: "KillResult | None" = None
    adapters: "KillResult | None" = None
    images: "KillResult | None" = None
    qwen_vl: "KillResult | None" = None

    @property
    def parts(self) -> "list[KillResult]":
        parts = (self, self.with_files, self.adapters, self.images, self.qwen_vl)
        return [part for part in parts if part is not None]

    @property
    def killed(self) -> dict[str, int]:
        return dict(sorted(Counter(death.role for death in self.deaths).items()))


def soak_plan(minutes: float, every: float, **others: Any) -> KillPlan:
    """A death every `every` seconds on average."""
    return KillPlan(**others, kills=max(1, round(60 * minutes / every)), seconds_between=every)


async def kill(ring: Ring, plan: KillPlan, on_kill: Callable[[], None]) -> list[Death]:
    """Sends SIGKILL to random services, each role equally often, regardless of the state of the ring. Raises
    RuntimeError if none of a role is left."""
    deaths: list[Death] = []
    began, source = time.monotonic(), random.Random(plan.seed)
    for _ in range(plan.kills):
        await asyncio.sleep(source.uniform(0.5, 1.5) * plan.seconds_between)
        role = source.choice(("router", "engine", "detok"))
        while not (alive := [c for c in ring.children.values() if c.role == role and c.alive]):
            if role in ring.missing:
                raise RuntimeError(f"the launcher gave up every {role}: it failed to start too often")
            await asyncio.sleep(POLL_SECONDS)
        child = source.choice(alive)
        # The service may have died just before the kill; then the kill does not count.
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
            deaths.append(Death(child.name, round(time.monotonic() - began, 2)))
        on_kill()
    return deaths


def measure(plan: KillPlan, folder: Path, step: Step) -> KillResult:
    found = _on_bundled_model(replace(plan, files=False) if plan.with_files else plan, step)
    if plan.with_files:
        found = replace(found, with_files=_on_bundled_model(replace(plan, with_files=False), step))
    if plan.adapters is not None:
        beside = replace(plan.adapters, threads=plan.threads)
        adapters.write_adapters(folder)
        with adapters.ring(beside, folder) as ring:
            requests = adapters.requests(beside, folder)
            found = replace(found, adapters=asyncio.run(kill_and_compare(ring, beside, requests, step)))
    if plan.images is not None:
        beside, model = replace(plan.images, threads=plan.threads), images.write_model(folder / "llava")
        found = replace(found, images=_on_model(beside, model, images.requests(beside), step))
    if plan.qwen_vl is not None:
        found = replace(found, qwen_vl=measure_qwen_vl(replace(plan.qwen_vl, threads=plan.threads), folder, step))
    return found


def _on_bundled_model(plan: KillPlan, step: Step) -> KillResult:
    with plan.ring({}) as ring:
        return asyncio.run(kill_and_compare(ring, plan, plan.requests, step))


def measure_qwen_vl(plan: KillPlan, folder: Path, step: Step) -> KillResult:
    return _on_model(plan, qwen_vl.write_model(folder / "qwen_vl"), qwen_vl.requests(plan), step)


def _on_model(plan: KillPlan, model: Path, requests: Sequence[StreamRequest], step: Step) -> KillResult:
    with plan.ring({}, model=model) as ring:
        return asyncio.run(kill_and_compare(ring, plan, requests, step))


async def kill_and_compare(ring: Ring, plan: KillPlan, requests: Sequence[StreamRequest], step: Step) -> KillResult:
    watch, counter, in_files = MemoryWatch(ring), streams.StreamCounter(), bool(folders(ring))
    async with streams.connect(ring.addresses, plan.resume_seconds) as client:
        watching = asyncio.create_task(watch.run())
        quiet = await streams.undisturbed(client, requests, lambda: step("undisturbed"))
        began = time.monotonic()
        killing = asyncio.create_task(kill(ring, plan, lambda: step("streams run, services die")))
        await streams.without_pause(client, requests, quiet, killing, counter.add)
        watching.cancel()
        watch.sample()
        return KillResult(
            plan=plan,
            deaths=await killing,
            quiet_seconds=began - watch.began,
            seconds=time.monotonic() - began,
            quiet_first=thinned([found.first_token for found in quiet]),
            quiet_stall=thinned([found.stall for found in quiet]),
            memory=watch.trails,
            rounded=await count_rounded(client, counter.wrong),
            in_files=in_files,
            **counter.totals(),
        )


WARM_SECONDS: Mapping[str, float] = {"router": 30.0, "engine": 180.0, "detok": 30.0}
"""Warm-up of a process by role, during which its memory may grow: a KV block takes memory when it is first written."""
NAMES = {"router": "Routers", "engine": "Engines", "detok": "Detokenizers"}


def section(result: KillResult) -> Section:
    plan = result.plan
    return Section(
        "Streams while services die",
        f"{plan.text}; every {plan.seconds_between:g} s a random service gets SIGKILL. Each stream is compared with "
        "its undisturbed run: text, token ids, logprobs, finish reason, usage.",
        [
            answer(result),
            *([] if result.with_files is None else [_with_files(result.with_files)]),
            *([] if result.adapters is None else [_beside("engines with `lora`", result.adapters)]),
            *([] if result.images is None else [_beside("a LLaVA", result.images)]),
            *([] if result.qwen_vl is None else [_beside("a Qwen2.5-VL", result.qwen_vl)]),
        ],
        [pauses(result), _memory(result)],
    )


def _with_files(result: KillResult) -> str:
    return f"With pool files: {answer(result)}{'' if result.in_files else f' {NOT_USED}'}"


def _beside(where: str, result: KillResult) -> str:
    return f"With {where}, {result.plan.text}: {answer(result)}"


def soak_section(result: KillResult) -> Section:
    return Section(
        "Soak",
        f"The same load for {result.seconds / 60:.3g} minutes, with a death every {result.plan.seconds_between:g} s. "
        f"*Growth* is the slope of a process's memory after its first {WARM_SECONDS['router']:g} s (for engines "
        f"{WARM_SECONDS['engine']:g} s, since the KV cache takes memory when it is first written), over all processes "
        "of the service.",
        [answer(result), *([_growth(result)] if _slopes(result) else [])],
        [pauses(result), _memory(result)],
    )


def soak_summary(result: KillResult) -> str:
    slopes = ", ".join(f"{name} {growth:+.2f}" for name, growth in _slopes(result).items())
    return (
        f"{result.seconds / 60:.1f} min, {len(result.deaths)} deaths: {result.streams} streams, "
        f"{result.failed} failed, {result.wrong - result.rounded} wrong; longest pause "
        f"{max(result.stall, default=0.0):.0f} s; MiB per minute after warm-up: "
        f"{slopes or 'the run was too short'}"
    )


def answer(result: KillResult) -> str:
    killed = ", ".join(f"{count} of {role}" for role, count in result.killed.items())
    rounded = (
        f" {result.rounded} sampled another token of nearly the same likelihood, as also happens when a stream resumes "
        "without any death ([rounding](../api.md#seeds))."
    )
    return (
        f"{len(result.deaths)} kills ({killed}) in {result.seconds:.0f} s: {result.streams} streams, **{result.failed} "
        f"failed, {result.wrong - result.rounded} wrong**; {result.resumed} continued at another router."
        f"{rounded if result.rounded else ''}"
    )


def _growth(result: KillResult) -> str:
    slopes = _slopes(result)
    most = max(slopes, key=slopes.__getitem__)
    return f"After warm-up no service grows by more than **{slopes[most]:.2f} MiB per minute** ({most})."


def _sides(result: KillResult) -> dict[str, tuple[list[float], list[float]]]:
    """Times to the first token and longest pauses."""
    sides = {"undisturbed": (result.quiet_first, result.quiet_stall), "services die": (result.first, result.stall)}
    if result.with_files is not None:
        sides["with pool files"] = (result.with_files.first, result.with_files.stall)
    return sides


def pauses(result: KillResult) -> Table:
    sides = _sides(result)
    names = ("first token p50", "first token p99", "longest pause p50", "longest pause p99")
    cells = [streams.wait_cells(*waits).split(" | ") for waits in sides.values()]
    lines = (" | ".join([name, *row]) for name, *row in zip(names, *cells, strict=True))
    return table(" | ".join(["ms", *sides]), lines)


def _memory(result: KillResult) -> Table:
    slopes = _slopes(result)
    rows = []
    for service, (before, after) in sorted(before_and_after(result.memory, result.quiet_seconds).items()):
        lives = [trail.mebibytes for trail in result.memory if trail.service == service]
        cells = map(number, (before, after, max(map(max, lives)), slopes.get(service)))
        rows.append(" | ".join([service, str(len(lives)), *cells]))
    return table("memory, MiB | processes | before | at the end | at most | growth per minute", rows)


def _slopes(result: KillResult) -> dict[str, float]:
    """MiB per minute by service, without services that never ran longer than their warm-up."""
    found = {}
    for service in sorted({trail.service for trail in result.memory}):
        warm = WARM_SECONDS[service.partition("-")[0]]
        lives = [trail.after(warm) for trail in result.memory if trail.service == service]
        growth = slope([trail for trail in lives if trail.seconds])
        if growth is not None:
            found[service] = growth
    return found


def draw(result: KillResult) -> Figure:
    about = "Distributions of each stream's longest wait."
    figure, (row,) = canvas((1, 2), (12, 4.8), "Streams while services die", about)
    looks = list(zip(_sides(result).items(), (BLUE, ORANGE, TEAL), strict=False))
    for i, heading in enumerate(("First token", "Longest pause")):
        distribution(row[i], heading, "s", [Series(name, colour, waits[i]) for (name, waits), colour in looks])
    return figure


def draw_soak(result: KillResult) -> Figure:
    roles = [role for role in ROLES if any(trail.role == role for trail in result.memory)]
    figure, grid = canvas((len(roles), 1), (12, 2.2 * len(roles) + 1), "Memory over time", "Vertical lines: deaths.")
    for (axes,), role in zip(grid, roles, strict=True):
        trails(axes, [trail for trail in result.memory if trail.role == role])
        for death in result.deaths:
            colour = GREY if death.role == role else FAINT
            axes.axvline((death.at + result.quiet_seconds) / 60, color=colour, linewidth=0.9, zorder=0)
        frame(axes, f"{NAMES[role]}, MiB", x="minutes", grid="y")
    return figure


WITH_ADAPTERS = KillPlan(30, 120, kills=20, seed=8, mixed=adapters.MIXED)
WITH_IMAGES = KillPlan(15, 120, kills=10, seconds_between=6.0, seed=9, mixed=images.MIXED)
"""Kills are less frequent, because an engine with transformers' vision tower takes longer to start."""
WITH_QWEN_VL = replace(WITH_IMAGES, max_tokens=400, seed=10, mixed=qwen_vl.MIXED)
"""More tokens, because the model is small and most streams should still run when a service dies."""
QUICK = KillPlan(
    8,
    60,
    kills=3,
    with_files=True,
    adapters=replace(WITH_ADAPTERS, streams=10, max_tokens=60, kills=3),
    images=replace(WITH_IMAGES, streams=5, max_tokens=60, kills=2, seconds_between=2.0),
    qwen_vl=replace(WITH_QWEN_VL, streams=5, max_tokens=60, kills=2, seconds_between=2.0),
)
WHOLE = KillPlan(with_files=True, adapters=WITH_ADAPTERS, images=WITH_IMAGES, qwen_vl=WITH_QWEN_VL)
TOPIC = Topic(WHOLE, QUICK, measure, KillResult, section, draw)
QUICK_SOAK = soak_plan(0.1, 5.0, streams=8, max_tokens=60)
SOAK = Topic(soak_plan(30.0, 20.0), QUICK_SOAK, measure, KillResult, soak_section, draw_soak)
