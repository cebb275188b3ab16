"""Many requests at once against a small queue."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import grpc
import msgspec
from grpc import aio

from bench.harness.calls import REQUEST, RequestLines, has_retry_info, spec
from bench.harness.children import cpu_seconds
from bench.harness.stats import thinned
from sluice.launch import Ring
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub

MAX_TOKENS = 4
PROMPT_TOKENS = 8
MILLISECONDS = 1000.0


class Volley(msgspec.Struct, frozen=True):
    requests: int
    seconds: float = 0.0
    """Within which they are sent; 0: at once."""
    connections: int = 1

    @property
    def name(self) -> str:
        return f"burst-{self.requests}-{self.seconds:g}"


class Burst(msgspec.Struct, frozen=True):
    requests: int
    seconds: float
    """Within which they are sent; 0: at once."""
    served: int
    refused: int
    told_when: int
    """Rejections with RetryInfo."""
    client: list[float]
    router: list[float]
    """As the router reports it: from when it has read the message."""
    cpu: dict[str, float]
    connections: int = 1
    unexplained: dict[str, int] = {}
    """Calls that failed without the router's rejection, by status: it never saw them."""


class Retried(msgspec.Struct, frozen=True):
    requests: int
    served: int
    errors: dict[str, int]
    seconds: float


async def measure_burst(ring: Ring, lines: RequestLines, volley: Volley) -> Burst:
    refusals: list[tuple[float, bool]] = []
    unexplained: Counter[str] = Counter()
    requests, name = volley.requests, volley.name

    async with AsyncExitStack() as stack:
        # Otherwise gRPC joins channels to one address into one connection.
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
    logged = await lines.until(REQUEST, name, requests - unexplained.total())
    return Burst(
        requests,
        volley.seconds,
        requests - len(refusals) - unexplained.total(),
        len(refusals),
        sum(when for _, when in refusals),
        thinned([MILLISECONDS * took for took, _ in refusals]),
        thinned([MILLISECONDS * line["seconds"] for line in logged if line["outcome"] == "OVERLOADED"]),
        used,
        volley.connections,
        dict(unexplained),
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
    prompt = [100 + number % 1000] * PROMPT_TOKENS
    return pb.GenerateRequest(spec=spec(prompt, MAX_TOKENS, request_id))


def _policy(first_backoff: float) -> Mapping[str, Any]:
    """Five attempts is gRPC's maximum."""
    retry = {
        "maxAttempts": 5,
        "initialBackoff": f"{first_backoff:g}s",
        "maxBackoff": f"{16 * first_backoff:g}s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"],
    }
    return {"methodConfig": [{"name": [{"service": "sluice.v1.GenerationService"}], "retryPolicy": retry}]}
