"""Pauses of streams whose engine or detokenizer is killed, frozen, cut off or drained, by cause."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import replace

from bench.deaths.processes import VICTIMS as VICTIMS
from bench.deaths.processes import Processes
from bench.harness.style import BLUE, GREY, ORANGE, TEAL, Series, canvas, distribution
from bench.harness.tables import Section, number, table
from bench.harness.topic import Plan, Step, Topic
from sluice import AsyncClient
from sluice.client import SluiceError
from sluice.loadgen.report import percentile

CUT_OFF = "cut off"
CAUSES = ("killed", "frozen", CUT_OFF, "drained")
COLOURS = (ORANGE, BLUE, TEAL, GREY)
BEFORE, NOW = "before", "now"
FORMER = "SLUICE_BENCH_FORMER"
"""Environment variable with the folder of an older version's code, which is then measured in turns with this one."""
ROUND_SECONDS = 30.0
POLL_SECONDS = 0.02
BEGUN = 30
"""Chunks after which a stream is no longer suspected of killing its engine."""


class PausesPlan(Plan, frozen=True):
    streams: int = 16
    rounds: int = 3
    max_tokens: int = 1500
    causes: tuple[str, ...] = CAUSES
    note: str = ""
    """A remark on the circumstances, for the page."""


class Pauses(msgspec.Struct, frozen=True):
    version: str
    cause: str
    victim: str
    seconds: list[float]
    """Longest wait of each stream that lost its attempt, since shortly before the event."""
    noticed: list[float]
    """Time of the same streams from the event until the router gave up the attempt."""


class PausesResult(msgspec.Struct, frozen=True):
    plan: PausesPlan
    failed: int
    pauses: list[Pauses]


class _Stream:
    """A running stream, and the times of its chunks."""

    def __init__(self, client: AsyncClient, max_tokens: int) -> None:
        self.id = f"pause-{uuid4().hex[:12]}"
        self.times: list[float] = []
        self.failed = False
        options: dict[str, Any] = {
            "request_id": self.id,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
        }
        self.task = asyncio.create_task(self._read(client.stream("def main():\n", **options)))

    async def _read(self, stream: AsyncIterator[Any]) -> None:
        try:
            async for _ in stream:
                self.times.append(time.monotonic())
        except SluiceError:
            self.failed = True

    def pause(self, since: float) -> float:
        """The longest wait that began shortly before `since` or later. An unfinished wait counts up to now."""
        times = [at for at in self.times if at >= since - 0.2] + [time.monotonic()]
        return max((b - a for a, b in pairwise(times)), default=0.0)


def measure(plan: PausesPlan, folder: Path, step: Step) -> PausesResult:
    """Without root, network links cannot be cut off, and that cause is left out."""
    if os.geteuid():
        plan = replace(plan, causes=tuple(cause for cause in plan.causes if cause != CUT_OFF))
    return asyncio.run(_measure(plan, folder, step))


def _sources() -> dict[str, Path]:
    here, former = Path(__file__).parents[2], os.environ.get(FORMER)
    return {BEFORE: Path(former), NOW: here} if former else {NOW: here}


async def _measure(plan: PausesPlan, folder: Path, step: Step) -> PausesResult:
    apart, sources = CUT_OFF in plan.causes, enumerate(_sources().items())
    rings = {name: Processes(folder / name, source, i, apart) for i, (name, source) in sources}
    keys = [(version, cause, victim) for version in rings for cause in plan.causes for victim in VICTIMS]
    found = {key: Pauses(*key, [], []) for key in keys}
    failed = 0
    try:
        for ring in rings.values():
            await ring.start()
        for _ in range(plan.rounds):
            for (version, cause, victim), pauses in _in_turns(found):
                seconds, noticed, errors = await _round(rings[version], plan, cause, victim)
                pauses.seconds.extend(seconds)
                pauses.noticed.extend(noticed)
                failed += errors
                step(f"{victim} {cause}, {version}")
    finally:
        for ring in rings.values():
            await ring.stop()
    return PausesResult(plan, failed, list(found.values()))


def _in_turns(found: dict[tuple[str, str, str], Pauses]) -> list[tuple[tuple[str, str, str], Pauses]]:
    """Sorted so that the versions alternate."""
    return sorted(found.items(), key=lambda item: item[0][1:])


async def _round(ring: Processes, plan: PausesPlan, cause: str, victim: str) -> tuple[list[float], list[float], int]:
    """Returns pauses, times until they were noticed, and the number of failed streams."""
    await ring.whole()
    async with AsyncClient(ring.address) as client:
        streams = [_Stream(client, plan.max_tokens) for _ in range(plan.streams)]
        while not all(len(stream.times) > BEGUN or stream.task.done() for stream in streams):
            await asyncio.sleep(POLL_SECONDS)
        struck, at = time.time(), time.monotonic()
        await _strike(ring, cause, victim)
        lost: list[_Stream] = []
        while time.monotonic() - at < ROUND_SECONDS and not (lost and all(_goes_on(stream) for stream in lost)):
            await asyncio.sleep(0.5)
            given_up = ring.given_up(struck)
            lost = [stream for stream in streams if stream.id in given_up]
        noticed = [round(given_up[stream.id] - struck, 4) for stream in lost]
        seconds = [round(stream.pause(at), 4) for stream in lost]
        for stream in streams:
            stream.task.cancel()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
    await _heal(ring, cause, victim)
    return seconds, noticed, sum(stream.failed for stream in streams)


def _goes_on(stream: _Stream) -> bool:
    """Whether the stream has recent chunks, or has ended."""
    return stream.task.done() or bool(stream.times and time.monotonic() - stream.times[-1] < 0.25)


async def _strike(ring: Processes, cause: str, victim: str) -> None:
    match cause:
        case "killed":
            ring.send(victim, signal.SIGKILL)
        case "frozen":
            ring.send(victim, signal.SIGSTOP)
        case _ if cause == CUT_OFF:
            ring.cut(victim, down=True)
        case _:
            ring.send(victim, signal.SIGTERM)


async def _heal(ring: Processes, cause: str, victim: str) -> None:
    match cause:
        case "frozen":
            ring.send(victim, signal.SIGCONT)
        case _ if cause == CUT_OFF:
            ring.cut(victim, down=False)
        case _:
            await ring.ended(victim)
            ring.begin(victim)


def section(result: PausesResult) -> Section:
    versions = list(dict.fromkeys(each.version for each in result.pauses))
    rows = []
    for cause in result.plan.causes:
        for victim in VICTIMS:
            for version in versions:
                (pauses,) = [p for p in result.pauses if (p.version, p.cause, p.victim) == (version, cause, victim)]
                kinds = (sorted(pauses.noticed), sorted(pauses.seconds))
                cells = [number(1000 * percentile(kind, p)) if kind else "" for kind in kinds for p in (50, 99)]
                name = f"{victim.partition('-')[0]} {cause}, {version}"
                rows.append(" | ".join([name, str(len(pauses.seconds)), *cells]))
    answer = (
        "**Killed**: p50 and p99 of "
        + "; ".join(f"{version} {_cell(_seconds(result, version, 'killed', VICTIMS))} ms" for version in versions)
        + f". {result.failed} streams failed."
    )
    return Section(
        "Pauses by cause",
        f"{result.plan.streams} streams through a router, two engines and two detokenizers over TCP, with the default "
        "`peer_timeout` of 5 s. An engine or a detokenizer gets SIGKILL (killed), SIGSTOP (frozen), SIGTERM "
        f"(drained), or its network link is taken down (cut off, which needs root), {result.plan.rounds} times each. "
        "*Pause*: the longest wait for text of each stream that lost its attempt. *Noticed*: time from the event "
        "until the router gave up the attempt; the rest of a pause is placement and the recomputation of tokens that "
        "are not cached. *Before*: an older version, which noticed a death only after a second without heartbeats, "
        "measured in turns with this one. "
        f"{result.plan.note}".rstrip(),
        [answer],
        [table("ms | pauses | noticed p50 | p99 | pause p50 | p99", rows)],
    )


def _cell(seconds: Sequence[float]) -> str:
    return " and ".join(number(1000 * percentile(seconds, p)) for p in (50, 99)) if seconds else "no"


def _seconds(result: PausesResult, version: str, cause: str, victims: Sequence[str]) -> list[float]:
    wanted = [p for p in result.pauses if (p.version, p.cause) == (version, cause) and p.victim in victims]
    return sorted(second for pauses in wanted for second in pauses.seconds)


def draw(result: PausesResult) -> Figure:
    versions = list(dict.fromkeys(each.version for each in result.pauses))
    figure, (row,) = canvas((1, len(versions)), (12, 4.8), "Pauses by cause", "Streams that lost their attempt.")
    for axes, version in zip(row, versions, strict=True):
        causes = zip(result.plan.causes, COLOURS, strict=False)
        shown = [Series(cause, colour, _seconds(result, version, cause, VICTIMS)) for cause, colour in causes]
        distribution(axes, f"Pause, {version}", "s", shown)
    return figure


QUICK = PausesPlan(6, 1, causes=("killed",))
TOPIC = Topic(PausesPlan(), QUICK, measure, PausesResult, section, draw)
