import asyncio
import json
import threading

import grpc
import pytest
from grpc import StatusCode

from sluice.ring.stats import StepStats
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fakes.ring_peers import generate, hang
from tests.router.conftest import refused, text_spec

RETRY = {
    "methodConfig": [
        {
            "name": [{"service": "sluice.v1.GenerationService"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.2s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"],
            },
        }
    ]
}


@pytest.fixture
async def full(ring, start):
    """One request is live, one waits, and that is all there is room for."""
    ring.add_engine()
    ring.add_detokenizer()
    ring.script = hang
    client = await start(max_live=1, max_waiting=1)
    live = client.stream(text_spec())
    await live.read()
    waiting = client.stream(text_spec())
    reading = asyncio.ensure_future(waiting.read())
    await client.until(lambda: client.router._admission.waiting == 1)
    yield client, live, waiting
    waiting.cancel()
    await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.parametrize("streaming", [True, False])
async def test_beyond_the_queue_the_answer_comes_at_once_without_metadata(full, streaming):
    client, *_ = full
    spec = text_spec()
    call = client.stream(spec) if streaming else client.generation.Generate(pb.GenerateRequest(spec=spec))
    details = await refused(call.read() if streaming else call)
    assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert details.retry.retry_delay.ToMilliseconds() == 1000
    assert not await call.initial_metadata()
    assert client.lines()[-1]["outcome"] == "OVERLOADED"


async def test_a_clients_own_retry_policy_acts_on_it(full, ring):
    client, live, _ = full
    options = [("grpc.service_config", json.dumps(RETRY)), ("grpc.enable_retries", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{client.router.port}", options=options) as channel:
        stub = GenerationServiceStub(channel)
        call = stub.GenerateStream(pb.GenerateStreamRequest(spec=text_spec()))
        reading = asyncio.ensure_future(call.read())
        await client.until(lambda: client.lines())
        ring.script = generate
        live.cancel()
        assert (await reading).HasField("started")
        assert client.lines()[0]["outcome"] == "OVERLOADED"
        call.cancel()


async def test_prompt_tokens_are_bounded_too(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    ring.script = hang
    client = await start(max_live=1, max_waiting=100, max_waiting_tokens=1000)
    long = pb.GenerationSpec(token_ids=pb.TokenIds(ids=[5] * 600))
    first = client.stream(long)
    await first.read()
    second = client.stream(long)
    reading = asyncio.ensure_future(second.read())
    await client.until(lambda: client.router._admission.waiting_tokens == 600)
    assert (await refused(client.events(long))).info.reason == "OVERLOADED"
    first.cancel()
    second.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_the_engines_bound_what_is_live(ring, start):
    ring.add_engine().stats = StepStats(max_requests=2, tokens_per_kv_block=16)
    ring.add_detokenizer()
    ring.script = hang
    client = await start()
    calls = [client.stream(text_spec()) for _ in range(3)]
    readings = [asyncio.ensure_future(call.read()) for call in calls]
    await client.until(lambda: client.router._admission.waiting == 1 and len(ring.calls) >= 2)
    assert len(ring.calls) == 2
    for call in calls:
        call.cancel()
    await asyncio.gather(*readings, return_exceptions=True)


async def test_texts_that_wait_for_the_tokenizer_are_bounded(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(max_texts=2, text_threads=1)
    go_on = threading.Event()
    busy = [asyncio.ensure_future(client.router._text._run(1, lambda: go_on.wait(60))) for _ in range(2)]
    await client.until(lambda: client.router._text._waiting == 2)
    call = client.generation.Tokenize(pb.TokenizeRequest(text="x"))
    assert (await refused(call)).code == StatusCode.RESOURCE_EXHAUSTED
    go_on.set()
    assert await asyncio.gather(*busy) == [True, True]
    assert (await client.generation.Tokenize(pb.TokenizeRequest(text="x"))).token_ids


async def test_bytes_of_texts_that_wait_for_the_tokenizer_are_bounded(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(max_text_bytes=1000, text_threads=1)
    go_on = threading.Event()
    busy = asyncio.ensure_future(client.router._text._run(900, lambda: go_on.wait(60)))
    await client.until(lambda: client.router._text._waiting == 1)
    chat = pb.GenerationSpec(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x" * 101)]))
    for spec in (text_spec(text="x" * 101), chat):
        details = await refused(client.events(spec))
        assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert details.retry is not None
    small = asyncio.ensure_future(client.events(text_spec(text="x" * 100)))
    await client.until(lambda: client.router._text._waiting == 2)
    go_on.set()
    assert await busy
    assert (await small)[-1].HasField("done")
    # One alone may be of any length.
    assert (await client.events(text_spec(text="x " * 600)))[-1].HasField("done")
    assert client.router._text._waiting_bytes == 0
