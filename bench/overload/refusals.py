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

from bench.calls import has_retry_info, spec
from bench.children import cpu_seconds
from bench.lines import Lines
from bench.stats import thinned
from sluice.launch import Ring
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub

MAX_TOKENS = 4
PROMPT_TOKENS = 8
MILLISECONDS = 1000.0


class Volley(msgspec.Struct, frozen=True):
    """Requests of a burst."""

    requests: int
    seconds: float = 0.0
    """In which they come; 0: at once."""
    connections: int = 1
    """Over which they come, in turns."""

    @property
    def name(self) -> str:
        """Of the ids of its requests."""
        return f"burst-{self.requests}-{self.seconds:g}"


class Burst(msgspec.Struct, frozen=True):
    """Requests that come within some seconds, none of which is sent twice. Times in milliseconds, sorted."""

    requests: int
    seconds: float
    """In which they come; 0: at once."""
    served: int
    refused: int
    told_when: int
    """Refusals that say when to come again."""
    client: list[float]
    """From call to refusal, as the client sees it."""
    router: list[float]
    """The same as the router tells: from when it has read the message."""
    cpu: dict[str, float]
    """Of client and router, per request."""
    connections: int = 1
    unexplained: dict[str, int] = {}
    """Calls that failed without the router's refusal, by status: it never saw them."""


class Retried(msgspec.Struct, frozen=True):
    """The same at once, by a client with a retry policy."""

    requests: int
    served: int
    errors: dict[str, int]
    """By status."""
    seconds: float


async def burst(ring: Ring, lines: Lines, volley: Volley) -> Burst:
    """Send them and count."""
    refusals: list[tuple[float, bool]] = []
    unexplained: Counter[str] = Counter()
    requests, name = volley.requests, volley.name

    async with AsyncExitStack() as stack:
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
    told = await lines.of_requests(name, requests - unexplained.total())
    return Burst(
        requests,
        volley.seconds,
        requests - len(refusals) - unexplained.total(),
        len(refusals),
        sum(when for _, when in refusals),
        thinned([MILLISECONDS * took for took, _ in refusals]),
        thinned([MILLISECONDS * line["seconds"] for line in told if line["outcome"] == "OVERLOADED"]),
        used,
        volley.connections,
        dict(unexplained),
    )


async def retried(address: str, requests: int, first_backoff: float) -> Retried:
    """Send them at once through gRPC's own retries."""
    errors: dict[str, int] = {}
    began = time.perf_counter()
    options = [("grpc.service_config", json.dumps(_policy(first_backoff)))]
    async with aio.insecure_channel(address, options=options) as channel:
        stub = GenerationServiceStub(channel)

        async def one(i: int) -> None:
            try:
                await stub.Generate(_request(i, ""))
            except aio.AioRpcError as error:
                errors[error.code().name] = errors.get(error.code().name, 0) + 1

        await asyncio.gather(*map(one, range(requests)))
    return Retried(requests, requests - sum(errors.values()), errors, time.perf_counter() - began)


def _cpu(ring: Ring) -> dict[str, float]:
    """Seconds so far."""
    return {"client": time.process_time(), "router": cpu_seconds(ring.pids["router"])}


def _request(number: int, request_id: str) -> pb.GenerateRequest:
    prompt = [100 + number % 1000] * PROMPT_TOKENS
    return pb.GenerateRequest(spec=spec(prompt, MAX_TOKENS, request_id))


def _policy(first_backoff: float) -> Mapping[str, Any]:
    """Five attempts are gRPC's most."""
    retry = {
        "maxAttempts": 5,
        "initialBackoff": f"{first_backoff:g}s",
        "maxBackoff": f"{16 * first_backoff:g}s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"],
    }
    return {"methodConfig": [{"name": [{"service": "sluice.v1.GenerationService"}], "retryPolicy": retry}]}
