"""One tenant floods, another sends little."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
from grpc import aio

from bench.harness.calls import REQUEST, RequestLines, StreamTimes, deltas, spec, time_stream
from bench.harness.stats import thinned
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub

MILLISECONDS = 1000.0
SETTLING_SECONDS = 0.5


class TenantPlan(msgspec.Struct, frozen=True):
    rounds: int
    requests: int
    """Of the quiet tenant, one after the other, in each half of a round."""
    flood: int
    """Requests of the other that are always in flight."""
    flood_tokens: int
    prompt_tokens: int = 32
    output_tokens: int = 16


class TenantTimes(msgspec.Struct, frozen=True):
    first_token: list[float]
    queue: list[float]
    """In the router, until the request was submitted to an engine."""
    gaps: list[float]
    """Between two tokens: how long a step takes."""


class Tenants(msgspec.Struct, frozen=True):
    plan: TenantPlan
    batch: int
    alone: TenantTimes
    flooded: TenantTimes


async def measure_tenants(address: str, lines: RequestLines, plan: TenantPlan, batch: int) -> Tenants:
    """With and without the flood, in turns."""
    alone: list[StreamTimes] = []
    flooded: list[StreamTimes] = []
    async with aio.insecure_channel(address) as channel, aio.insecure_channel(address) as other:
        quiet = GenerationServiceStub(channel)
        await _ask(quiet, "warm", 0, plan)
        for round_ in range(plan.rounds):
            alone += await _ask(quiet, "alone", round_, plan)
            async with _flood(GenerationServiceStub(other), plan, batch):
                flooded += await _ask(quiet, "flooded", round_, plan)
    count = plan.rounds * plan.requests
    return Tenants(
        plan,
        batch,
        _asked(alone, await lines.until(REQUEST, "alone", count)),
        _asked(flooded, await lines.until(REQUEST, "flooded", count)),
    )


async def _ask(stub: GenerationServiceStub, name: str, round_: int, plan: TenantPlan) -> list[StreamTimes]:
    found = []
    for i in range(plan.requests):
        request_id = f"{name}-{round_ * plan.requests + i}"
        # A salt of its own: no prompt may be found in the cache.
        asked = spec(
            [100] * plan.prompt_tokens, plan.output_tokens, request_id, kv_cache=pb.KvCacheOptions(salt=request_id)
        )
        found.append(await time_stream(stub, asked, "quiet"))
    return found


@asynccontextmanager
async def _flood(stub: GenerationServiceStub, plan: TenantPlan, batch: int) -> AsyncIterator[None]:
    """`plan.flood` requests in flight, from when half a batch of them generates."""
    running = 0
    full = asyncio.Event()

    async def repeat(number: int) -> None:
        nonlocal running
        while True:
            started = False
            async for _ in deltas(stub, spec([300 + number] * plan.prompt_tokens, plan.flood_tokens), "flood"):
                running += not started
                started = True
                if running >= batch // 2:
                    full.set()

    tasks = [asyncio.create_task(repeat(number)) for number in range(plan.flood)]
    try:
        waiting = asyncio.create_task(full.wait())
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if not full.is_set():
            raise RuntimeError("the flood did not start")
        await asyncio.sleep(SETTLING_SECONDS)
        yield
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


def _asked(streams: list[StreamTimes], lines: list[dict[str, float]]) -> TenantTimes:
    return TenantTimes(
        thinned([MILLISECONDS * found.first_token for found in streams]),
        thinned([MILLISECONDS * line["queue_seconds"] for line in lines]),
        thinned([MILLISECONDS * gap for found in streams for gap in found.gaps]),
    )
