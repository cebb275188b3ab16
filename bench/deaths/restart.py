"""Restarts every service, one after the other, then stops an engine for a while, and checks the streams."""

import asyncio
from pathlib import Path

import msgspec
from matplotlib.figure import Figure

from bench.deaths import streams
from bench.deaths.freeze import CALLBACK, Frozen, Leftovers, freeze, leftovers
from bench.harness.style import BLUE, FAINT, GREY, ORANGE, TEAL, Series, canvas, dashed, distribution, frame, note
from bench.harness.tables import Section, Table, number, short, table
from bench.harness.topic import Step, Topic
from sluice.launch import LogLine, Ring

QUIET, RESTARTS, STOPPED, GOES_ON = "undisturbed", "rolling restart", "an engine stands still", "it goes on"
LOOKS = {QUIET: GREY, RESTARTS: ORANGE, STOPPED: BLUE, GOES_ON: TEAL}
MOST_SECONDS = 5.0
POLL_SECONDS = 0.01


class RestartPlan(streams.StreamsPlan, frozen=True):
    drain_timeout: float = 3.0
    stopped_seconds: float = 30.0
    after_seconds: float = 10.0


class Restart(msgspec.Struct, frozen=True):
    service: str
    drain: float
    """Seconds from the call until the process had ended."""
    back: float
    """Seconds from then until the new process served and all routers had discovered it."""
    ending: str


class RestartPhase(streams.StreamTotals, frozen=True, kw_only=True):
    name: str
    seconds: float


class RestartResult(msgspec.Struct, frozen=True):
    plan: RestartPlan
    peer_seconds: float
    phases: list[RestartPhase]
    """In the order of LOOKS."""
    restarts: list[Restart]
    frozen: Frozen
    left: Leftovers


def measure(plan: RestartPlan, _: Path, step: Step) -> RestartResult:
    """Runs all phases in one ring. Raises ValueError if the launcher would restart the frozen engine."""
    lines: list[LogLine] = []
    with plan.ring({"stats_callback": CALLBACK}, drain_timeout=plan.drain_timeout, observe=lines.append) as ring:
        if plan.stopped_seconds >= ring.plan.freeze_timeout:
            raise ValueError(
                f"stopped_seconds is {plan.stopped_seconds:g}, but the launcher restarts an engine after "
                f"{ring.plan.freeze_timeout:g} s without progress"
            )
        return asyncio.run(_measure(ring, lines, plan, step))


async def _measure(ring: Ring, lines: list[LogLine], plan: RestartPlan, step: Step) -> RestartResult:
    requests, phases = plan.requests, _Phases()

    def on_continue() -> None:
        phases.begin(GOES_ON)
        step(STOPPED)

    async with streams.connect(ring.addresses) as client:
        quiet = await streams.undisturbed(client, requests, lambda: step(QUIET))
        for found in quiet:
            phases.add(found, found)
        phases.begin(RESTARTS)
        restarting = asyncio.create_task(restart_all(ring, step))
        await streams.without_pause(client, requests, quiet, restarting, phases.add)
        phases.begin(STOPPED)
        name = next(name for name, child in ring.children.items() if child.role == "engine")
        seconds = (plan.stopped_seconds, plan.after_seconds)
        freezing = asyncio.create_task(freeze(ring, lines, name, *seconds, on_continue))
        await streams.without_pause(client, requests, quiet, freezing, phases.add)
        ended = phases.end()
        step(GOES_ON)
        left = await leftovers(client, ring)
        return RestartResult(plan, streams.PEER_SECONDS, ended, await restarting, await freezing, left)


async def restart_all(ring: Ring, step: Step) -> list[Restart]:
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
        await asyncio.sleep(POLL_SECONDS)
    ended = clock()
    await restarting
    return Restart(name, round(ended - began, 3), round(clock() - ended, 3), child.ending)


class _Phases:
    """The phases, one after the other, each with the streams that ended in it."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, float, streams.StreamCounter]] = []
        self.begin(QUIET)

    def begin(self, name: str) -> None:
        self._begun.append((name, asyncio.get_running_loop().time(), streams.StreamCounter()))

    def add(self, found: streams.StreamSeen, truth: streams.StreamSeen) -> None:
        self._begun[-1][2].add(found, truth)

    def end(self) -> list[RestartPhase]:
        ends = [began for _, began, _ in self._begun[1:]] + [asyncio.get_running_loop().time()]
        return [
            RestartPhase(name=name, seconds=round(end - began, 2), **counter.totals())
            for (name, began, counter), end in zip(self._begun, ends, strict=True)
        ]


def section(result: RestartResult) -> Section:
    plan = result.plan
    drains = (f"{r.service} | {number(r.drain)} | {number(r.back)} | {r.ending}" for r in result.restarts)
    return Section(
        "Streams while services are restarted, and while an engine is stopped",
        f"{plan.text}; routers consider a peer dead after {result.peer_seconds:g} s without heartbeats. Every service "
        f"is restarted, one after the other, with a drain timeout of {plan.drain_timeout:g} s; then "
        f"{result.frozen.service} gets SIGSTOP, and SIGCONT {plan.stopped_seconds:g} s later. Each stream is compared "
        "with its undisturbed run, and counted in the phase in which it ended. *Serves again*: when all routers have "
        "discovered the new process.",
        [_restart_answer(result), _freeze_answer(result)],
        [_phases_table(result), table("restarted | drain, s | serves again after, s | the process", drains)],
    )


def _restart_answer(result: RestartResult) -> str:
    longest = max(result.restarts, key=lambda restart: restart.drain)
    phase = result.phases[1]
    return (
        f"{len(result.restarts)} services are restarted in {phase.seconds:.0f} s: {_streams(phase)}. The longest drain "
        f"took **{longest.drain:.2f} s** ({longest.service}; limit: {MOST_SECONDS:g} s)."
    )


def _freeze_answer(result: RestartResult) -> str:
    frozen, left = result.frozen, result.left
    _, _, stopped, afterwards = result.phases
    silent = f"; no heartbeat of {', '.join(left.silent)}" if left.silent else ""
    return (
        f"{frozen.service} is stopped for {frozen.seconds:g} s: {_streams(stopped)}. It had {frozen.held} requests; "
        f"after it continued, it sampled late tokens for {frozen.late} of them, and received {frozen.new} new "
        f"requests: {_streams(afterwards)}. At the end {left.requests} requests, {left.blocks} blocks and "
        f"{left.streams} streams are left in the ring{silent}."
    )


def _streams(phase: RestartPhase) -> str:
    return f"**{phase.streams} streams, {phase.failed} failed, {phase.wrong} wrong, {phase.repeated} repeated**"


def _phases_table(result: RestartResult) -> Table:
    rows = []
    for p in result.phases:
        counts = map(str, (p.streams, p.failed, p.wrong, p.repeated, p.resumed))
        rows.append(" | ".join([p.name, *counts, streams.wait_cells(p.first, p.stall)]))
    waits = "first token p50, ms | first token p99 | longest pause p50 | longest pause p99"
    return table(f"| streams | failed | wrong | repeated | at another router | {waits}", rows)


def draw(result: RestartResult) -> Figure:
    title = "Streams while services are restarted, and while an engine is stopped"
    about = f"{sum(phase.streams for phase in result.phases[1:]):,} streams. Each stream's longest wait."
    figure, ((restarts, pauses),) = canvas((1, 2), (12, 4.8), title, about)
    names, drains, backs = zip(*((each.service, each.drain, each.back) for each in result.restarts), strict=True)
    restarts.barh(names, drains, 0.6, color=ORANGE, label="drains")
    restarts.barh(names, backs, 0.6, left=drains, color=FAINT, label="starts again")
    for row, drain in enumerate(drains):
        note(restarts, f"{short(drain)} s", (drain, row), (4, 0), ha="left", va="center")
    dashed(restarts, MOST_SECONDS, "limit")
    restarts.invert_yaxis()
    restarts.legend(frameon=False)
    frame(restarts, "Rolling restart", f"a drain may take {MOST_SECONDS:g} s", x="seconds")
    distribution(pauses, "Longest pause", "s", [Series(one.name, LOOKS[one.name], one.stall) for one in result.phases])
    return figure


QUICK = RestartPlan(3, 60, stopped_seconds=5.0, after_seconds=1.0)
TOPIC = Topic(RestartPlan(32), QUICK, measure, RestartResult, section, draw)
