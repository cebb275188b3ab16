"""One client reads nothing: what its neighbours notice, and what the services hold for it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from grpc import aio

from bench.calls import deltas, spec
from bench.lines import Lines
from bench.memory import Trail, Watch
from bench.rounds import Step
from sluice.launch import Ring
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub

SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
SLOW = "slow"
PAUSED = "attempt given up"


class Plan(msgspec.Struct, frozen=True):
    """How much of it."""

    model: Path
    neighbours: int
    neighbour_tokens: int
    """Of each of their streams, one after the other."""
    slow_tokens: int
    undelivered_tokens: int
    """The bound beyond which a stream pauses."""
    rounds: int
    seconds: float
    """Of each half of a round."""
    long_seconds: float
    """That one reads nothing at the end, while memory is watched."""
    engine: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """Runs to come."""
        return 2 * self.rounds + 2


class Result(msgspec.Struct, frozen=True):
    """Speeds in tokens per second of all neighbours together, one of each per round."""

    neighbours: int
    undelivered_tokens: int
    seconds: float
    long_seconds: float
    without: list[float]
    beside: list[float]
    """While one reads nothing."""
    slow_tokens: int
    read_later: int
    """Tokens that the last slow reader got when it read on."""
    slow_from: float
    """When the last slow reader's stream paused, in seconds of the memory's clock."""
    memory: list[Trail]

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios of the speed beside a slow reader to that without."""
        return median(b / a for a, b in zip(self.without, self.beside, strict=True))


def measure(plan: Plan, _: Path, step: Step) -> Result:
    """In turns over one ring."""
    lines = Lines()
    bound = {"max_undelivered_tokens": plan.undelivered_tokens}
    with Ring(plan.model, engine_args=plan.engine, router_args=bound, observe=lines) as ring:
        return asyncio.run(_Turns(ring, lines, plan, step).run())


class _Turns:
    def __init__(self, ring: Ring, lines: Lines, plan: Plan, step: Step) -> None:
        self._ring = ring
        self._lines = lines
        self._plan = plan
        self._step = step
        self._tokens = 0
        """That the neighbours have got."""

    async def run(self) -> Result:
        plan = self._plan
        without: list[float] = []
        beside: list[float] = []
        async with self._neighbours(), asyncio.TaskGroup() as tasks:
            await self._speed(plan.seconds)
            watch = Watch(self._ring)
            watching = tasks.create_task(watch.run())
            for round_ in range(plan.rounds):
                without.append(await self._speed(plan.seconds))
                self._step("all read")
                async with self._slow_reader(f"{SLOW}-{round_}"):
                    beside.append(await self._speed(plan.seconds))
                self._step("one reads nothing")
            async with self._slow_reader(f"{SLOW}-last") as stream:
                slow_from = watch.trails[0].seconds[-1]
                await asyncio.sleep(plan.long_seconds)
                self._step(f"one reads nothing for {plan.long_seconds:g} s")
                watching.cancel()
                watch.look()
                read = await _rest(stream)
                self._step("it reads on")
        return Result(
            plan.neighbours,
            plan.undelivered_tokens,
            plan.seconds,
            plan.long_seconds,
            without,
            beside,
            plan.slow_tokens,
            read,
            slow_from,
            watch.trails,
        )

    @asynccontextmanager
    async def _neighbours(self) -> AsyncIterator[None]:
        async with aio.insecure_channel(self._ring.address) as channel, asyncio.TaskGroup() as tasks:
            stub = GenerationServiceStub(channel)
            started = [tasks.create_task(self._read(stub, number)) for number in range(self._plan.neighbours)]
            yield
            for task in started:
                task.cancel()

    async def _read(self, stub: GenerationServiceStub, number: int) -> None:
        while True:
            async for count in deltas(stub, spec([100 + number] * 16, self._plan.neighbour_tokens)):
                self._tokens += count

    async def _speed(self, seconds: float) -> float:
        loop, before = asyncio.get_running_loop(), self._tokens
        began = loop.time()
        await asyncio.sleep(seconds)
        return (self._tokens - before) / (loop.time() - began)

    @asynccontextmanager
    async def _slow_reader(self, name: str) -> AsyncIterator[Any]:
        """A stream that has paused for nobody reads it. Each of its tokens brings twenty others and their logprobs."""
        output = pb.OutputOptions(logprobs=20)
        asked = spec([99] * 16, self._plan.slow_tokens, f"{name}-stream", output=output)
        async with aio.insecure_channel(self._ring.address, options=SMALL_WINDOW) as channel:
            stream: Any = GenerationServiceStub(channel).GenerateStream(pb.GenerateStreamRequest(spec=asked))
            await stream.read()
            await self._lines.until(PAUSED, name, 1)
            yield stream
            stream.cancel()


async def _rest(stream: Any) -> int:
    """Tokens of what is still to come."""
    tokens = 0
    while (event := await stream.read()) is not aio.EOF:
        tokens += event.delta.token_count
    return tokens
