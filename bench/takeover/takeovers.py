"""The engine of a stream with a long context dies, freezes or drains: the pause, and what is computed again."""

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from bench.deaths.requests import StreamRequest
from bench.deaths.streams import StreamSeen, connect, read_stream
from bench.harness.engine_counters import ADOPTED_BLOCKS, CONTEXT_TOKENS, FETCHED_BLOCKS, EngineCounters
from bench.harness.models import python_prompts
from bench.harness.pool_files import OFF, ON, folders
from bench.harness.topic import Steps
from bench.takeover.rings import LongPlan, WatchedStream
from sluice.launch import Ring


class Case(NamedTuple):
    engines: int
    number: signal.Signals
    strikes: int = 1


KILLED = "killed, with a twin"
CASES: Mapping[str, Case] = {
    KILLED: Case(2, signal.SIGKILL),
    "frozen, with a twin": Case(2, signal.SIGSTOP),
    "drained, with a twin": Case(2, signal.SIGTERM),
    "killed, alone": Case(1, signal.SIGKILL),
    "killed twice, alone": Case(1, signal.SIGKILL, strikes=2),
}

COUNTED = {"recomputed": CONTEXT_TOKENS, "adopted": ADOPTED_BLOCKS, "fetched": FETCHED_BLOCKS}


class TakeoverPlan(LongPlan, frozen=True, kw_only=True):
    kv: tuple[str, ...] = (OFF, ON)
    precisions: tuple[str, ...] = ("float32", "int8")
    prompts: tuple[int, ...] = (4000, 7500)
    """Tokens. The model's context has 8,192."""
    max_tokens: int = 160
    begun: int = 40
    """Output tokens before the first strike, and between two."""
    repeats: int = 5
    """Runs of each case."""


class Takeover(msgspec.Struct, frozen=True):
    """One run. Times are in seconds."""

    precision: str
    prompt: int
    case: str
    kv: str
    first_token: float
    """Of this stream, computed without any cached block."""
    pause: float
    """The longest time between two deltas from the first strike on."""
    recomputed: int
    """Context tokens that the engines computed from the first strike on."""
    adopted: int
    """Blocks that the engines adopted from the first strike on; an engine that is restarted adopts them too."""
    fetched: int
    difference: str
    """From the undisturbed stream; empty if text, tokens, and log-probabilities within a tolerance are the same."""
    same_bits: bool
    """Whether all log-probabilities have the same bits."""


class TakeoverResult(msgspec.Struct, frozen=True):
    plan: TakeoverPlan
    runs: list[Takeover]
    in_files: bool = True
    """Whether the engines that should have pool files had them."""

    def of(self, **fields: Any) -> list[Takeover]:
        return [run for run in self.runs if all(getattr(run, name) == value for name, value in fields.items())]


def measure(plan: TakeoverPlan, _: Path, step: Steps) -> TakeoverResult:
    runs: list[Takeover] = []
    in_files = True
    for precision in plan.precisions:
        turns = _Turns(plan, precision, runs, step)
        for engines in sorted({case.engines for case in CASES.values()}):
            # The rings of both sides run at the same time, so that they take turns.
            with ExitStack() as stack:
                rings = {kv: stack.enter_context(plan.ring(precision, kv, engines=engines)) for kv in plan.kv}
                in_files &= all(folders(ring) for kv, ring in rings.items() if kv == ON)
                asyncio.run(turns.run(rings, engines))
    return TakeoverResult(plan, runs, in_files)


@dataclass
class _Turns:
    """All runs in one precision."""

    _plan: TakeoverPlan
    _precision: str
    _runs: list[Takeover]
    _step: Steps
    _truths: dict[int, StreamSeen] = field(default_factory=dict)
    """Undisturbed streams by the length of the prompt. They are computed once, for all cases and both sides."""

    async def run(self, rings: Mapping[str, Ring], engines: int) -> None:
        """The cases with this number of engines."""
        for prompt in self._plan.prompts:
            if prompt not in self._truths:
                self._truths[prompt] = await _undisturbed(next(iter(rings.values())), _request(self._plan, prompt, ""))
                self._step(f"{self._precision}, {prompt:,} tokens, undisturbed")
            for name, case in CASES.items():
                if case.engines == engines:
                    await self._repeat(rings, name, prompt)

    async def _repeat(self, rings: Mapping[str, Ring], name: str, prompt: int) -> None:
        for repeat in range(self._plan.repeats):
            # A longer prompt begins with the shorter ones.
            request = _request(self._plan, prompt, f"{name}, {prompt}, {repeat}")
            for kv in self._plan.kv if repeat % 2 == 0 else reversed(self._plan.kv):
                found = await _strike(rings[kv], CASES[name], request, self._truths[prompt], self._plan.begun)
                self._runs.append(Takeover(self._precision, prompt, name, kv, **found))
                done = f"{self._precision}, {prompt:,} tokens, {name}, pool files {kv}, run {repeat + 1}"
                self._step(done, TakeoverResult(self._plan, self._runs))


def _request(plan: TakeoverPlan, tokens: int, salt: str) -> StreamRequest:
    """The same request each time, with a salt of its own, so that no other run's blocks are found for it."""
    (prompt,) = python_prompts(plan.model, 1, tokens)
    options = {"max_tokens": plan.max_tokens, "ignore_eos": True, "temperature": 0.0, "logprobs": 1, "token_ids": True}
    return StreamRequest("greedy", prompt, {**options, "kv_cache": {"salt": salt}})


async def _undisturbed(ring: Ring, request: StreamRequest) -> StreamSeen:
    async with connect(ring.addresses) as client:
        found = await read_stream(client, request)
    if found.faults:
        raise RuntimeError(f"an undisturbed stream failed: {found.faults[0]}")
    return found


async def _strike(ring: Ring, case: Case, request: StreamRequest, truth: StreamSeen, begun: int) -> dict[str, Any]:
    """Fields of `Takeover`. Afterwards all engines serve again."""
    counters = EngineCounters(ring)
    async with connect(ring.addresses) as client:
        stream = WatchedStream(client, request)
        await stream.until(begun)
        victim = await counters.busy()
        before = await _counts(counters)
        struck = time.monotonic()
        os.kill(ring.pids[victim], case.number)
        for _ in range(case.strikes - 1):
            # Once it has made progress, the request is not suspected of killing its engines.
            await stream.until(stream.tokens + begun)
            await counters.sample()
            os.kill(ring.pids[victim], case.number)
        seen = await stream.task
        after = await _counts(counters)
    await _heal(ring, victim)
    return {
        "first_token": round(stream.first_token, 4),
        "pause": round(max(stream.gaps(struck), default=0.0), 4),
        "difference": seen.difference(truth),
        "same_bits": [output.logprobs for output in seen.outputs] == [output.logprobs for output in truth.outputs],
        **{name: after[name] - before[name] for name in COUNTED},
    }


async def _counts(counters: EngineCounters) -> dict[str, int]:
    await counters.sample()
    return {name: int(counters.total(metric)) for name, metric in COUNTED.items()}


async def _heal(ring: Ring, victim: str) -> None:
    """Restarts the engine, even if it was restarted already: otherwise each death would delay the next restart."""
    with suppress(ProcessLookupError):
        os.kill(ring.pids[victim], signal.SIGCONT)
    await asyncio.to_thread(ring.restart, victim)


def quick(plan: TakeoverPlan) -> TakeoverPlan:
    """The smallest sizes, on the bundled model."""
    small = {"precisions": ("float32",), "prompts": (600,), "max_tokens": 1000, "repeats": 1}
    return replace(plan, real=False, **small)
