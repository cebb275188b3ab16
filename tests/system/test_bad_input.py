"""Invalid requests to a real ring: each is refused with its status, and none affects concurrent streams."""

import asyncio
import time

import grpc

from sluice import AsyncClient
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub
from tests.router.conftest import refused, text_spec
from tests.router.parse.bad_specs import SPECS
from tests.router.parse.test_bad_requests import check

STREAMS = 8


async def streamed(client: AsyncClient, i: int, request_id: str | None = None) -> str:
    spec = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.9, "seed": i, "request_id": request_id}
    return "".join([chunk.text async for chunk in client.stream(f"def f{i}(x):\n    ", **spec)])


async def test_invalid_requests_change_no_concurrent_stream(ring):
    async with AsyncClient(ring.address, timeout=100) as client, grpc.aio.insecure_channel(ring.address) as channel:
        stub = GenerationServiceStub(channel)
        alone = await asyncio.gather(*(streamed(client, i) for i in range(STREAMS)))
        concurrent = asyncio.gather(*(streamed(client, i, f"live-{i}") for i in range(STREAMS)))
        seconds = {}
        for name, spec, code, field in SPECS:
            if spec.HasField("prompt_embeds"):
                # They have the hidden size of the fake engines' model.
                continue
            start = time.perf_counter()
            details = await refused(stub.Generate(pb.GenerateRequest(spec=spec)))
            seconds[name] = time.perf_counter() - start
            check(details, code, field)
        slowest = max(seconds, key=seconds.__getitem__)
        print(f"slowest of {len(SPECS)}: {slowest}, {seconds[slowest] * 1000:.1f} ms")
        assert await concurrent == alone


async def test_the_id_of_a_live_request_is_refused_until_it_ends(ring):
    async with AsyncClient(ring.address, timeout=100) as client, grpc.aio.insecure_channel(ring.address) as channel:
        stub = GenerationServiceStub(channel)
        duplicate = pb.GenerateRequest(spec=text_spec(request_id="twice"))
        async with client.stream("def f(", n=8, max_tokens=1500, ignore_eos=True, request_id="twice") as stream:
            await anext(stream)
            details = await refused(stub.Generate(duplicate))
            assert (details.code, details.info.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
            assert await client.abort("twice")
            second = asyncio.ensure_future(client.generate("def g(", max_tokens=5, request_id="twice"))
            rest = [chunk async for chunk in stream]
            assert rest[-1].finish_reason == "aborted"
        assert (await second).usage.completion_tokens >= 1
