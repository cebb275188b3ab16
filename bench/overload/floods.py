"""Many requests at the same time with a small queue; and a tenant that floods while another one sends few requests."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import msgspec
from grpc import aio
from msgspec.structs import asdict

from bench.harness.calls import REQUEST, StreamTimes, has_retry_info, spec, streaming, time_stream, until_logged
from bench.harness.children import cpu_seconds
from bench.harness.stats import thinned
from sluice.launch import LogLine, Ring
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub

MAX_TOKENS = 4
PROMPT_TOKENS = 8
MILLISECONDS = 1000.0
SETTLING_SECONDS = 0.5


class Volley(msgspec.Struct, frozen=True):
    requests: int
    seconds: float = 0.0
    """Time within which the requests are sent; 0: together."""
    connections: int = 1


class Burst(Volley, frozen=True, kw_only=True):
    served: int
    refused: int
    told_when: int
    """Rejections with RetryInfo."""
    client: list[float]
    """Milliseconds from the call to the rejection, at the client."""
    router: list[float]
    """Milliseconds in the router, from the time when it has read the message to the rejection."""
    cpu: dict[str, float]
    """CPU milliseconds per request of client and router."""
    unexplained: dict[str, int] = {}
    """Calls that failed without a rejection by the router, which never received them, by status."""


class Retried(msgspec.Struct, frozen=True):
    requests: int
    served: int
    errors: dict[str, int]
    seconds: float


async def measure_burst(ring: Ring, lines: Sequence[LogLine], volley: Volley) -> Burst:
    refusals: list[tuple[float, bool]] = []
    unexplained: Counter[str] = Counter()
    requests, name = volley.requests, f"burst-{volley.requests}-{volley.seconds:g}"

    async with AsyncExitStack() as stack:
        # Without this option gRPC uses one connection for all channels to an address.
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [aio.insecure_channel(ring.address, options) for _ in range(volley.connections)]
        for channel in channels:
            await stack.enter_async_context(channel)
            await channel.channel_ready()
        stubs = [GenerationServiceStub(channel) for channel in channels]
        before = _cpu(ring)

        async def one(i: int) -> None:
            await asyncio.sleep(volley.seconds * i / requests)
            began = time.perf_counter()
            try:
                await stubs[i % len(stubs)].Generate(_request(i, f"{name}-{i}"))
            except aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    refusals.append((time.perf_counter() - began, has_retry_info(error)))
                else:
                    unexplained[error.code().name] += 1

        await asyncio.gather(*map(one, range(requests)))
        used = {name: MILLISECONDS * (after - before[name]) / requests for name, after in _cpu(ring).items()}
    logged = await until_logged(lines, REQUEST, name, requests - unexplained.total())
    return Burst(
        **asdict(volley),
        served=requests - len(refusals) - unexplained.total(),
        refused=len(refusals),
        told_when=sum(when for _, when in refusals),
        client=thinned([MILLISECONDS * took for took, _ in refusals]),
        router=thinned([MILLISECONDS * line["seconds"] for line in logged if line["outcome"] == "OVERLOADED"]),
        cpu=used,
        unexplained=dict(unexplained),
    )


async def measure_retries(address: str, requests: int, first_backoff: float) -> Retried:
    errors: Counter[str] = Counter()
    began = time.perf_counter()
    options = [("grpc.service_config", json.dumps(_policy(first_backoff)))]
    async with aio.insecure_channel(address, options=options) as channel:
        stub = GenerationServiceStub(channel)

        async def one(i: int) -> None:
            try:
                await stub.Generate(_request(i, ""))
            except aio.AioRpcError as error:
                errors[error.code().name] += 1

        await asyncio.gather(*map(one, range(requests)))
    return Retried(requests, requests - errors.total(), dict(errors), time.perf_counter() - began)


def _cpu(ring: Ring) -> dict[str, float]:
    return {"client": time.process_time(), "router": cpu_seconds(ring.pids["router"])}


def _request(number: int, request_id: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(spec=spec([100 + number % 1000] * PROMPT_TOKENS, MAX_TOKENS, request_id))


def _policy(first_backoff: float) -> Mapping[str, Any]:
    """A service config with five attempts, gRPC's maximum."""
    retry = {
        "maxAttempts": 5,
        "initialBackoff": f"{first_backoff:g}s",
        "maxBackoff": f"{16 * first_backoff:g}s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"],
    }
    return {"methodConfig": [{"name": [{"service": "sluice.v1.GenerationService"}], "retryPolicy": retry}]}


class TenantPlan(msgspec.Struct, frozen=True):
    rounds: int
    requests: int
    """Consecutive requests of the quiet tenant in each half of a round."""
    flood: int
    """Requests of the flooding tenant that are always in flight."""
    flood_tokens: int
    prompt_tokens: int = 32
    output_tokens: int = 16


class TenantTimes(msgspec.Struct, frozen=True):
    """Times of the quiet tenant's requests, in milliseconds."""

    first_token: list[float]
    queue: list[float]
    """Time in the router until the request was submitted to an engine."""
    gaps: list[float]
    """Time between two tokens, which is the duration of a step."""


class Tenants(msgspec.Struct, frozen=True):
    plan: TenantPlan
    batch: int
    alone: TenantTimes
    flooded: TenantTimes


async def measure_tenants(address: str, lines: Sequence[LogLine], plan: TenantPlan, batch: int) -> Tenants:
    """Measures the quiet tenant with and without the flood, in turns."""
    found: dict[str, list[StreamTimes]] = {"alone": [], "flooded": []}
    async with aio.insecure_channel(address) as channel, aio.insecure_channel(address) as other:
        quiet = GenerationServiceStub(channel)
        await _send_requests(quiet, "warm", 0, plan)
        for round_ in range(plan.rounds):
            found["alone"] += await _send_requests(quiet, "alone", round_, plan)
            async with _flood(GenerationServiceStub(other), plan, batch):
                found["flooded"] += await _send_requests(quiet, "flooded", round_, plan)
    times = []
    for name, streams in found.items():
        logged = await until_logged(lines, REQUEST, name, len(streams))
        queue = thinned([MILLISECONDS * line["queue_seconds"] for line in logged])
        first = thinned([MILLISECONDS * stream.first_token for stream in streams])
        gaps = thinned([MILLISECONDS * gap for stream in streams for gap in stream.gaps])
        times.append(TenantTimes(first, queue, gaps))
    return Tenants(plan, batch, *times)


async def _send_requests(stub: GenerationServiceStub, name: str, round_: int, plan: TenantPlan) -> list[StreamTimes]:
    found = []
    for i in range(plan.requests):
        request_id = f"{name}-{round_ * plan.requests + i}"
        # A different salt for each request prevents prefix cache hits.
        cache = pb.KvCacheOptions(salt=request_id)
        request = spec([100] * plan.prompt_tokens, plan.output_tokens, request_id, kv_cache=cache)
        found.append(await time_stream(stub, request, "quiet"))
    return found


@asynccontextmanager
async def _flood(stub: GenerationServiceStub, plan: TenantPlan, batch: int) -> AsyncIterator[None]:
    """Keeps `plan.flood` requests in flight; the context starts when half a batch of them generates."""
    generating: set[int] = set()
    full = asyncio.Event()

    def on_tokens(i: int, _: int) -> None:
        generating.add(i)
        if len(generating) >= batch // 2:
            full.set()

    specs = [spec([300 + i] * plan.prompt_tokens, plan.flood_tokens) for i in range(plan.flood)]
    async with streaming(stub, specs, on_tokens, "flood"):
        await full.wait()
        await asyncio.sleep(SETTLING_SECONDS)
        yield
