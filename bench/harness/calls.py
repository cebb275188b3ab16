"""Plain gRPC calls, like those of a client in any language, and the routers' log lines about them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import msgspec
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from sluice.launch import LogLine
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub
from sluice.v1.sampling_pb2 import SamplingParams, StoppingCriteria

TENANT_KEY = "x-sluice-tenant"
STATUS_KEY = "grpc-status-details-bin"


class StreamTimes(msgspec.Struct, frozen=True):
    """Times of one stream, in seconds."""

    first_token: float
    """Since the call."""
    gaps: list[float]
    """Between consecutive deltas."""


def spec(prompt: Sequence[int], max_tokens: int, request_id: str = "", **fields: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(
        request_id=request_id,
        token_ids=pb.TokenIds(ids=prompt),
        stopping=StoppingCriteria(max_tokens=max_tokens, ignore_eos=True),
        sampling=SamplingParams(temperature=0.0),
        **fields,
    )


async def deltas(stub: GenerationServiceStub, request: pb.GenerationSpec, tenant: str = "") -> AsyncIterator[int]:
    """The number of tokens of each delta."""
    metadata = ((TENANT_KEY, tenant),) if tenant else ()
    stream: Any = stub.GenerateStream(pb.GenerateStreamRequest(spec=request), metadata=metadata)
    async for event in stream:
        if event.delta.token_count:
            yield event.delta.token_count


@asynccontextmanager
async def streaming(
    stub: GenerationServiceStub,
    specs: Sequence[pb.GenerationSpec],
    on_tokens: Callable[[int, int], None],
    tenant: str = "",
) -> AsyncIterator[None]:
    """Streams each of these specs repeatedly until the context ends. `on_tokens(index of the spec, tokens)` is called
    for each delta."""

    async def repeat(i: int) -> None:
        while True:
            async for count in deltas(stub, specs[i], tenant):
                on_tokens(i, count)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(repeat(i)) for i in range(len(specs))]
        yield
        for task in tasks:
            task.cancel()


async def time_stream(stub: GenerationServiceStub, request: pb.GenerationSpec, tenant: str = "") -> StreamTimes:
    began = time.perf_counter()
    times = [time.perf_counter() async for _ in deltas(stub, request, tenant)]
    return StreamTimes(times[0] - began, [b - a for a, b in pairwise(times)])


def has_retry_info(error: aio.AioRpcError) -> bool:
    found: Mapping[str, Any] = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(found.get(STATUS_KEY, b""))
    return any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)


REQUEST, GIVEN_UP = "request_ended", "attempt_given_up"
"""Log events of a router: the end of a request, and of an attempt that was given up before its request ended."""
POLL_SECONDS = 0.05
TIMEOUT_SECONDS = 30.0


async def until_logged(lines: Sequence[LogLine], event: str, name: str, count: int) -> list[dict[str, Any]]:
    """Fields of `count` lines of `event` on requests with ids `name-…`, once logged. Raises TimeoutError."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        events = [line.fields for line in lines if line.event == event]
        found = [fields for fields in events if fields["request_id"].startswith(f"{name}-")]
        if len(found) >= count:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(found)} of {count} lines: {event}, {name}")
        await asyncio.sleep(POLL_SECONDS)
