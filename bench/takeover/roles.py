"""Running streams while long prompts arrive, on engines of both phases and on prefill and decode engines."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import replace

from bench.deaths.requests import StreamRequest
from bench.deaths.streams import StreamSeen, connect, read_stream
from bench.harness.models import python_prompts
from bench.harness.pool_files import NOT_USED, ON, folders
from bench.harness.stats import thinned
from bench.harness.style import BLUE, GREY, ORANGE, TEAL, Series, canvas, distribution
from bench.harness.tables import Section, number, numbers, table
from bench.harness.topic import Step, Topic
from bench.takeover.rings import LongPlan, WatchedStream
from sluice import AsyncClient
from sluice.loadgen.report import percentile

GOAL = 1.3
"""Highest acceptable ratio of the p99 between tokens beside long prompts to that of undisturbed streams."""
TOGETHER, APART = "two engines of both phases", "a prefill and a decode engine"
KINDS: Mapping[str, Mapping[str, int]] = {
    TOGETHER: {"engines": 2},
    APART: {"engines": 0, "prefill_engines": 1, "decode_engines": 1},
}
COLOURS = {TOGETHER: (GREY, ORANGE), APART: (BLUE, TEAL)}
STREAM_TOKENS = 32


class RolesPlan(LongPlan, frozen=True, kw_only=True):
    precision: str = "float32"
    streams: int = 8
    begun: int = 8
    """Tokens of each stream before the measurement begins."""
    max_tokens: int = 4000
    """Of each stream: it must run until the measurement ends."""
    prompt: int = 4000
    """Tokens of the long prompts, which arrive one after the other."""
    prompt_output: int = 8
    seconds: float = 30.0
    """Without and with long prompts, each."""
    turns: int = 2
    """Of both, in the same streams, so that their growing context affects both alike."""
    repeats: int = 3
    """Starts of each ring."""
    kinds: tuple[str, ...] = tuple(KINDS)


class Waits(msgspec.Struct, frozen=True):
    """Times in seconds, over all starts of a ring."""

    kind: str
    quiet: list[float]
    """Between two deltas of a stream without long prompts, thinned."""
    beside: list[float]
    """The same while long prompts are computed."""
    first_token: list[float]
    """Of the long prompts."""
    wrong: int
    """Long prompts that failed or whose output differs from that of the first one."""

    @property
    def ratio(self) -> float:
        """p99 beside long prompts divided by that without."""
        return percentile(self.beside, 99) / percentile(self.quiet, 99)


class RolesResult(msgspec.Struct, frozen=True):
    plan: RolesPlan
    waits: list[Waits]
    in_files: bool = True
    """Whether the engines had pool files."""


def measure(plan: RolesPlan, _: Path, step: Step) -> RolesResult:
    found = {kind: _Session(plan) for kind in plan.kinds}
    in_files = True
    for repeat in range(plan.repeats):
        for kind in plan.kinds if repeat % 2 == 0 else reversed(plan.kinds):
            with plan.ring(plan.precision, ON, **KINDS[kind]) as ring:
                in_files &= bool(folders(ring))
                asyncio.run(found[kind].run(ring.addresses[0], repeat))
            step(f"{kind}, start {repeat + 1} of {plan.repeats}")
    truth = next(seen for session in found.values() for seen in session.prompts)
    return RolesResult(plan, [session.waits(kind, truth) for kind, session in found.items()], in_files)


class _Session:
    """Everything measured with one kind of ring."""

    def __init__(self, plan: RolesPlan) -> None:
        self._plan = plan
        self._quiet: list[float] = []
        self._beside: list[float] = []
        self.prompts: list[StreamSeen] = []

    async def run(self, address: str, repeat: int) -> None:
        plan = self._plan
        async with connect([address]) as client:
            running = [WatchedStream(client, request) for request in _stream_requests(plan)]
            await asyncio.gather(*(stream.until(plan.begun) for stream in running))
            for turn in range(plan.turns):
                began = time.monotonic()
                await asyncio.sleep(plan.seconds)
                arrived = time.monotonic()
                await self._send_prompts(client, f"{repeat}, {turn}")
                ended = time.monotonic()
                for stream in running:
                    self._quiet += stream.gaps(began, arrived)
                    self._beside += stream.gaps(arrived, ended)
            if over := [stream for stream in running if stream.task.done()]:
                raise RuntimeError(f"{len(over)} of {len(running)} streams ended before the measurement")
            for stream in running:
                stream.task.cancel()
            await asyncio.gather(*(stream.task for stream in running), return_exceptions=True)

    async def _send_prompts(self, client: AsyncClient, salt: str) -> None:
        """Long prompts one after the other, until the time is over. The last one is awaited."""
        end, count = time.monotonic() + self._plan.seconds, 0
        while time.monotonic() < end:
            self.prompts.append(await read_stream(client, _long_request(self._plan, f"{salt}, {count}")))
            count += 1

    def waits(self, kind: str, truth: StreamSeen) -> Waits:
        wrong = sum(bool(seen.difference(truth)) for seen in self.prompts)
        first = [round(seen.first_token, 4) for seen in self.prompts]
        return Waits(kind, thinned(self._quiet), thinned(self._beside), first, wrong)


def _stream_requests(plan: RolesPlan) -> list[StreamRequest]:
    prompts = python_prompts(plan.model, plan.streams, STREAM_TOKENS)
    return [StreamRequest("running", prompt, _options(plan.max_tokens)) for prompt in prompts]


def _long_request(plan: RolesPlan, salt: str) -> StreamRequest:
    """The same prompt each time, of which no block is found."""
    (prompt,) = python_prompts(plan.model, 1, plan.prompt)
    return StreamRequest("long", prompt, {**_options(plan.prompt_output), "kv_cache": {"salt": salt}})


def _options(max_tokens: int) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0, "token_ids": True}


def section(result: RolesResult) -> Section:
    plan = result.plan
    rows = []
    for each in result.waits:
        quiet, beside, first = (
            numbers(*(scale * percentile(times, percent) for percent in (50, 99)))
            for times, scale in ((each.quiet, 1000), (each.beside, 1000), (each.first_token, 1))
        )
        prompts = len(each.first_token)
        rows.append(f"{each.kind} | {quiet} | {beside} | {each.ratio:.2f}× | {first} | {prompts} | {each.wrong}")
    return Section(
        "Running streams while long prompts arrive",
        f"{plan.model_name}, {plan.precision}, {plan.streams} running streams. Prompts of {plan.prompt:,} tokens "
        f"arrive one after the other for {plan.seconds:g} s, {plan.turns} times in turns with as much time without "
        f"them, in {plan.repeats} starts of each ring. *Inter-token*: between two deltas of a running stream. A "
        "prefill engine computes a prompt and its first token, a decode engine all others.",
        [*map(_answer, result.waits), *([] if result.in_files else [NOT_USED])],
        [
            table(
                "ring | inter-token p50 · p99, ms, undisturbed | beside long prompts | ratio of p99 | long prompts: "
                "first token p50 · p99, s | long prompts | that differ",
                rows,
            )
        ],
    )


def _answer(each: Waits) -> str:
    goal = f" (goal: at most {GOAL:g}×)" if each.kind == APART else ""
    return (
        f"{each.kind.capitalize()}: the p99 between two tokens is **{each.ratio:.2f}×** that of undisturbed streams "
        f"while long prompts arrive ({number(1000 * percentile(each.beside, 99))} instead of "
        f"{number(1000 * percentile(each.quiet, 99))} ms){goal}."
    )


def draw(result: RolesResult) -> Figure:
    about = f"Prompts of {result.plan.prompt:,} tokens arrive one after the other. Time between two deltas."
    size = (6.0 * len(result.waits), 4.8)
    figure, (row,) = canvas((1, len(result.waits)), size, "Running streams while long prompts arrive", about)
    for axes, each in zip(row, result.waits, strict=True):
        quiet, beside = COLOURS[each.kind]
        sides = [Series("undisturbed", quiet, each.quiet), Series("beside long prompts", beside, each.beside)]
        distribution(axes, each.kind.capitalize(), "s", sides)
    return figure


PLAN = RolesPlan(kv_cache_tokens=40_960)
QUICK = replace(
    PLAN, real=False, streams=2, max_tokens=1500, prompt=400, seconds=0.5, turns=1, repeats=1, kinds=(TOGETHER,)
)
TOPIC = Topic(PLAN, QUICK, measure, RolesResult, section, draw)
