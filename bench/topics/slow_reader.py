"""One client stops reading: the speed of the other streams, and the memory of the services."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from grpc import aio
from matplotlib.figure import Figure
from msgspec.structs import asdict, replace

from bench.harness.calls import GIVEN_UP, spec, streaming, until_logged
from bench.harness.children import cpu_seconds
from bench.harness.memory import MemoryWatch, Trail, before_and_after
from bench.harness.models import TINY
from bench.harness.style import BLUE, GREY, Series, bars, canvas, dashed, frame, trails
from bench.harness.tables import Section, number, span, table
from bench.harness.topic import Plan, Step, Topic, engine_settings
from sluice.launch import LogLine, Ring
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub

# A small fixed window: with the default window, gRPC reads ahead for a client that does not read.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
MOST_SLOWER = 0.05


class SlowReaderPlan(Plan, frozen=True):
    neighbours: int = 32
    neighbour_tokens: int = 200
    slow_tokens: int = 1500
    undelivered_tokens: int = 256
    """The router's setting max_undelivered_tokens, beyond which the stream pauses."""
    undelivered_bytes: int = 1 << 20
    """The router's setting max_undelivered_bytes: the same for tensors."""
    tensors: bool = False
    """The stream also returns the logits of its tokens, 16 kB each."""
    rounds: int = 8
    seconds: float = 15.0
    long_seconds: float = 600.0


class SlowReaderResult(SlowReaderPlan, frozen=True, kw_only=True):
    """Speeds are tokens per second of all other streams together."""

    without: list[float]
    """Speeds without a slow reader, before each round and after the last."""
    beside: list[float]
    """Speeds with a slow reader, one per round."""
    read_later: int
    """Tokens (with tensors, rows) that the last slow reader received when it read again."""
    slow_from: float
    """When the last slow reader's stream paused, on the clock of the memory trails."""
    memory: list[Trail]
    cpu_without: float | None = None
    """CPU time of all services in microseconds per token: median of the turns. Other load on the machine changes it
    less than the speed. None: not measured."""
    cpu_beside: float | None = None

    @property
    def ratios(self) -> list[float]:
        """Speeds with a slow reader, divided by the mean of the speeds before and after, which cancels drift."""
        return [speed / fmean(self.without[i : i + 2]) for i, speed in enumerate(self.beside)]

    @property
    def ratio(self) -> float:
        return median(self.ratios)


def measure(plan: SlowReaderPlan, _: Path, step: Step) -> SlowReaderResult:
    lines: list[LogLine] = []
    bound = {"max_undelivered_tokens": plan.undelivered_tokens, "max_undelivered_bytes": plan.undelivered_bytes}
    with Ring(TINY, engine_args=engine_settings(plan.threads), router_args=bound, observe=lines.append) as ring:
        return asyncio.run(_Turns(ring, lines, plan, step).run())


class _Turn(NamedTuple):
    speed: float
    cpu: float
    """CPU time of all services in microseconds per token."""


@dataclass
class _Turns:
    _ring: Ring
    _lines: list[LogLine]
    _plan: SlowReaderPlan
    _step: Step
    _tokens: int = 0
    """Tokens received by the other streams."""

    async def run(self) -> SlowReaderResult:
        plan = self._plan
        without: list[_Turn] = []
        beside: list[_Turn] = []
        async with self._neighbours(), asyncio.TaskGroup() as tasks:
            await self._turn(plan.seconds)  # Warms up.
            watch = MemoryWatch(self._ring)
            watching = tasks.create_task(watch.run())
            for round_ in range(plan.rounds):
                without.append(await self._turn(plan.seconds))
                self._step("all read")
                async with self._slow_reader(f"slow-{round_}"):
                    beside.append(await self._turn(plan.seconds))
                self._step("one reads nothing")
            without.append(await self._turn(plan.seconds))
            async with self._slow_reader("slow-last") as stream:
                slow_from = watch.trails[0].seconds[-1]
                await asyncio.sleep(plan.long_seconds)
                self._step(f"one reads nothing for {plan.long_seconds:g} s")
                watching.cancel()
                watch.sample()
                read = await _read_rest(stream, self._plan.tensors)
                self._step("it reads on")
        return SlowReaderResult(
            **asdict(plan),
            without=[turn.speed for turn in without],
            beside=[turn.speed for turn in beside],
            read_later=read,
            slow_from=slow_from,
            memory=watch.trails,
            cpu_without=median(turn.cpu for turn in without),
            cpu_beside=median(turn.cpu for turn in beside),
        )

    @asynccontextmanager
    async def _neighbours(self) -> AsyncIterator[None]:
        def on_tokens(_: int, count: int) -> None:
            self._tokens += count

        specs = [spec([100 + i] * 16, self._plan.neighbour_tokens) for i in range(self._plan.neighbours)]
        async with (
            aio.insecure_channel(self._ring.address) as channel,
            streaming(GenerationServiceStub(channel), specs, on_tokens),
        ):
            yield

    async def _turn(self, seconds: float) -> _Turn:
        loop, tokens, cpu = asyncio.get_running_loop(), self._tokens, self._cpu()
        began = loop.time()
        await asyncio.sleep(seconds)
        tokens = self._tokens - tokens
        return _Turn(tokens / (loop.time() - began), 1e6 * (self._cpu() - cpu) / max(1, tokens))

    def _cpu(self) -> float:
        """CPU seconds of all services."""
        return sum(map(cpu_seconds, self._ring.pids.values()))

    @asynccontextmanager
    async def _slow_reader(self, name: str) -> AsyncIterator[Any]:
        """A stream that has paused because its client does not read. 20 logprobs per token fill its buffers sooner."""
        output = pb.OutputOptions(generation_logits=True) if self._plan.tensors else pb.OutputOptions(logprobs=20)
        request = spec([99] * 16, self._plan.slow_tokens, f"{name}-stream", output=output)
        async with aio.insecure_channel(self._ring.address, options=SMALL_WINDOW) as channel:
            stream: Any = GenerationServiceStub(channel).GenerateStream(pb.GenerateStreamRequest(spec=request))
            await stream.read()
            await until_logged(self._lines, GIVEN_UP, name, 1)
            yield stream
            stream.cancel()


async def _read_rest(stream: Any, tensors: bool) -> int:
    """Number of tokens or rows."""
    found = 0
    while (event := await stream.read()) is not aio.EOF:
        found += sum(event.tensor.shape[:1]) if tensors else event.delta.token_count
    return found


def section(result: SlowReaderResult) -> Section:
    speeds = (
        f"{round_} | {number(a)} | {number(b)} | {ratio:.3f}"
        for round_, (a, b, ratio) in enumerate(zip(result.without, result.beside, result.ratios, strict=False), 1)
    )
    memory = (
        f"{service} | {number(before)} | {number(after)} | {after - before:+.2f}"
        for service, (before, after) in sorted(before_and_after(result.memory, result.slow_from).items())
    )
    what = "rows" if result.tensors else "tokens"
    return Section(
        f"A client that stops reading{' tensors' if result.tensors else ''}",
        f"{result.neighbours} streams, with and without one more stream whose client does not read{_of_what(result)}, "
        f"in turns of {result.seconds:g} s (a ratio compares a turn with those before and after it). Then that client "
        f"does not read for {result.long_seconds:g} s, while memory is recorded. Its stream pauses once "
        f"{_bound(result)} undelivered.",
        [
            f"The other streams keep **{result.ratio:.1%}** of their speed (rounds: {span(result.ratios, '.0%')}; "
            f"acceptable loss: {MOST_SLOWER:.0%}). When the client read again, it received {result.read_later:,} of "
            f"{result.slow_tokens:,} {what}.",
            *_cpu(result),
        ],
        [
            table("round | tokens/s, all clients read | tokens/s, one does not | ratio", speeds),
            table(f"memory, MiB | when the stream paused | {result.long_seconds:g} s later | difference", memory),
        ],
    )


def _cpu(result: SlowReaderResult) -> list[str]:
    if result.cpu_without is None or result.cpu_beside is None:
        return []
    costs = f"{number(result.cpu_without)} µs without a slow client and {number(result.cpu_beside)} µs with one"
    return [
        f"CPU time of all services per token of the other streams: {costs}. Other load on the machine changes it less "
        "than the speed."
    ]


def _of_what(result: SlowReaderResult) -> str:
    return " and has requested the logits of its tokens" if result.tensors else ""


def _bound(result: SlowReaderResult) -> str:
    if result.tensors:
        return f"{result.undelivered_bytes >> 20} MiB is"
    return f"{result.undelivered_tokens} tokens are"


def draw(result: SlowReaderResult) -> Figure:
    pauses = f"its stream pauses once {_bound(result)} undelivered"
    about = f"{result.neighbours} other streams keep {result.ratio:.1%} of their speed; {pauses}."
    title = f"One client stops reading{' tensors' if result.tensors else ''}: effect on other streams"
    figure, ((speeds, memory),) = canvas((1, 2), (12, 4.8), title, about)
    without = result.without[: len(result.beside)]
    shown = [Series("all clients read", GREY, without), Series("one does not read", BLUE, result.beside)]
    bars(speeds, [str(round_) for round_ in range(1, len(result.beside) + 1)], shown)
    frame(speeds, "Tokens per second", "all other streams together", x="round")
    trails(memory, result.memory)
    dashed(memory, result.slow_from / 60, "client stops reading")
    frame(memory, "Memory, MiB", "blue: router, orange: engine, green: detokenizers", x="minutes", grid="y")
    return figure


QUICK = SlowReaderPlan(4, 60, 900, 64, rounds=1, seconds=2.0, long_seconds=2.0)
TOPIC = Topic(SlowReaderPlan(), QUICK, measure, SlowReaderResult, section, draw)
TENSORS = SlowReaderPlan(neighbours=16, tensors=True, rounds=8, seconds=5.0, long_seconds=60.0)
TENSORS_TOPIC = Topic(TENSORS, replace(QUICK, tensors=True), measure, SlowReaderResult, section, draw)
