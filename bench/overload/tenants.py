"""One tenant floods, another asks little."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
from grpc import aio

from bench.calls import Heard, deltas, listen, spec
from bench.lines import Lines
from bench.stats import thinned
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub

MILLISECONDS = 1000.0
SETTLING_SECONDS = 0.5


class TenantPlan(msgspec.Struct, frozen=True):
    """How much of it."""

    rounds: int
    requests: int
    """Of the quiet tenant, one after the other, in each half of a round."""
    flood: int
    """Requests of the other that are always there."""
    flood_tokens: int
    prompt_tokens: int = 32
    output_tokens: int = 16


class Asked(msgspec.Struct, frozen=True):
    """The quiet tenant's requests. Milliseconds, sorted."""

    first_token: list[float]
    queue: list[float]
    """In the router, until the request went to an engine."""
    gaps: list[float]
    """Between two tokens: how long a step takes."""


class Tenants(msgspec.Struct, frozen=True):
    """Alone, and in the flood."""

    plan: TenantPlan
    batch: int
    """Requests that an engine runs at once."""
    alone: Asked
    flooded: Asked


async def tenants(address: str, lines: Lines, plan: TenantPlan, batch: int) -> Tenants:
    """In turns within one run."""
    alone: list[Heard] = []
    flooded: list[Heard] = []
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
        _asked(alone, await lines.of_requests("alone", count)),
        _asked(flooded, await lines.of_requests("flooded", count)),
    )


async def _ask(stub: GenerationServiceStub, name: str, round_: int, plan: TenantPlan) -> list[Heard]:
    found = []
    for i in range(plan.requests):
        request_id = f"{name}-{round_ * plan.requests + i}"
        # No prompt is found in the cache.
        asked = spec(
            [100] * plan.prompt_tokens, plan.output_tokens, request_id, kv_cache=pb.KvCacheOptions(salt=request_id)
        )
        found.append(await listen(stub, asked, "quiet"))
    return found


@asynccontextmanager
async def _flood(stub: GenerationServiceStub, plan: TenantPlan, batch: int) -> AsyncIterator[None]:
    """So many requests at any time, the next as soon as one has ended."""
    running = 0
    full = asyncio.Event()

    async def again_and_again(number: int) -> None:
        nonlocal running
        while True:
            started = False
            async for _ in deltas(stub, spec([300 + number] * plan.prompt_tokens, plan.flood_tokens), "flood"):
                running += not started
                started = True
                if running >= batch // 2:
                    full.set()

    tasks = [asyncio.create_task(again_and_again(number)) for number in range(plan.flood)]
    try:
        waiting = asyncio.create_task(full.wait())
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if not full.is_set():
            raise RuntimeError("the flood did not begin")
        await asyncio.sleep(SETTLING_SECONDS)
        yield
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


def _asked(heard: list[Heard], told: list[dict[str, float]]) -> Asked:
    return Asked(
        thinned([MILLISECONDS * found.first_token for found in heard]),
        thinned([MILLISECONDS * line["queue_seconds"] for line in told]),
        thinned([MILLISECONDS * gap for found in heard for gap in found.gaps]),
    )
