"""What an attack costs an honest tenant and the services: times to first tokens, and memory."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import grpc

from bench.harness.machine import descendants
from bench.harness.memory import resident_bytes
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub

HONEST = (("x-sluice-tenant", "honest"),)
HOSTILE = (("x-sluice-tenant", "hostile"),)
MAX_RATIO = 2.0
MAX_GROWTH = 300 << 20
NOISE_SECONDS = 0.05
"""Attackers and services share the machine's cores, which alone delays a first token by as much."""
PAUSE_SECONDS = 0.05

Attack = Callable[[], Awaitable[object]]


class Memory:
    """Growth of processes' resident memory since the object was created, and of the largest process below each."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._idle = self._read()
        self.growth = dict.fromkeys(self._idle, 0)
        """The largest growth so far, in bytes."""

    def sample(self) -> None:
        for name, size in self._read().items():
            self.growth[name] = max(self.growth[name], size - self._idle[name])

    def _read(self) -> dict[str, int]:
        sizes = {name: resident_bytes(pid) for name, pid in self._pids.items()}
        below = {
            f"below {name}": max(map(resident_bytes, descendants(pid)[1:]), default=0)
            for name, pid in self._pids.items()
        }
        return sizes | below


async def first_token_seconds(stub: GenerationServiceStub, spec: pb.GenerationSpec, timeout: float = 60.0) -> float:
    """Seconds from the call of an honest tenant to its first token."""
    began = time.perf_counter()
    call = stub.GenerateStream(pb.GenerateStreamRequest(spec=spec), metadata=HONEST, timeout=timeout)
    first = None
    async for event in call:
        if first is None and event.HasField("delta"):
            first = time.perf_counter() - began
    assert first is not None, "the stream has no tokens"
    return first


async def median_first_token(address: str, spec: pb.GenerationSpec, count: int, memory: Memory) -> float:
    """The median over `count` requests, one after the other, each with another beginning."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub, seconds = GenerationServiceStub(channel), []
        for i in range(count):
            each = pb.GenerationSpec()
            each.CopyFrom(spec)
            beginning = f"{time.perf_counter_ns()} {i}: "
            if spec.HasField("chat"):
                each.chat.messages[0].content = beginning + spec.chat.messages[0].content
            else:
                each.text = beginning + spec.text
            seconds.append(await first_token_seconds(stub, each))
            memory.sample()
            await asyncio.sleep(PAUSE_SECONDS)
        return statistics.median(seconds)


@contextlib.asynccontextmanager
async def under(attacks: list[Attack], memory: Memory, warm_up: float = 1.0) -> AsyncIterator[None]:
    """Repeat attacks, each in a loop of its own, while the context is open."""

    async def repeat(attack: Attack) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await attack()
            # Even an attack that is refused immediately lets other coroutines run.
            await asyncio.sleep(0.001)

    async def sample() -> None:
        while True:
            memory.sample()
            await asyncio.sleep(0.05)

    tasks = [asyncio.ensure_future(task) for task in (*map(repeat, attacks), sample())]
    try:
        await asyncio.sleep(warm_up)
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


def check(name: str, quiet: float, attacked: float, memory: Memory) -> None:
    """Prints the figures, and compares them with the limits."""
    grown = {service: f"{size >> 20} MiB" for service, size in memory.growth.items() if size}
    print(f"{name}: first token {quiet:.3f} s alone, {attacked:.3f} s under attack; memory grew by {grown}")
    assert attacked <= MAX_RATIO * quiet + NOISE_SECONDS
    assert max(memory.growth.values()) <= MAX_GROWTH
