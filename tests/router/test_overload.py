import asyncio
import contextlib
import json
import threading

import grpc
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from router.access.principal import Principal
from router.errors import RequestError, abort
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub
from sluice.v1.sampling_pb2 import SamplingParams
from sluice.wire.errors import ErrorCode
from sluice.wire.stats import StepStats
from tests.fakes.ring_scripts import generate, hang
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
    """A router with room for one live and one waiting request, both taken."""
    ring.add_engine()
    ring.add_detokenizer()
    ring.script = hang
    client = await start(max_live=1, max_waiting=1)
    live = client.stream(text_spec())
    await live.read()
    waiting = client.stream(text_spec())
    reading = asyncio.ensure_future(waiting.read())
    await client.until(lambda: client.router.ring.admission.waiting == 1)
    yield client, live, waiting
    waiting.cancel()
    await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.parametrize("streaming", [True, False])
async def test_beyond_the_queue_requests_are_refused_immediately_without_metadata(full, streaming):
    client, *_ = full
    spec = text_spec()
    call = client.stream(spec) if streaming else client.generation.Generate(pb.GenerateRequest(spec=spec))
    details = await refused(call.read() if streaming else call)
    assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert details.retry.retry_delay.ToMilliseconds() == 1000
    assert not await call.initial_metadata()
    assert client.lines()[-1]["outcome"] == "OVERLOADED"


async def test_a_clients_retry_policy_applies(full, ring):
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


def patient_policy(seconds: float) -> list[tuple[str, str | int]]:
    """A gRPC retry policy whose own backoff is much longer than a test waits."""
    (method,) = RETRY["methodConfig"]
    slow = method["retryPolicy"] | {"initialBackoff": f"{seconds}s", "maxBackoff": f"{seconds}s"}
    return [("grpc.service_config", json.dumps({"methodConfig": [method | {"retryPolicy": slow}]}))]


async def test_grpc_retries_follow_the_servers_pushback(full, ring, monkeypatch):
    monkeypatch.setattr(ErrorCode.OVERLOADED, "retry_after", 0.02)
    client, live, _ = full
    options = patient_policy(1000.0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{client.router.port}", options=options) as channel:
        call = GenerationServiceStub(channel).GenerateStream(pb.GenerateStreamRequest(spec=text_spec()))
        reading = asyncio.ensure_future(call.read())
        await client.until(lambda: len(client.lines()) >= 2)
        # Not so soon that all attempts are used up before there is room.
        monkeypatch.setattr(ErrorCode.OVERLOADED, "retry_after", 1.0)
        ring.script = generate
        live.cancel()
        assert (await asyncio.wait_for(reading, 60)).HasField("started")
        call.cancel()


async def test_grpc_retries_stop_if_the_server_says_so(short_wait, begin_call):
    client, calls = begin_call
    options = patient_policy(0.01)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{client.router.port}", options=options) as channel:
        call = channel.stream_unary("/sluice.v1.GenerationService/Generate")()
        assert (await refused(call)).info.reason == "SLOW_CLIENT"
    assert len(calls) == 1


@pytest.fixture
def short_wait(monkeypatch):
    """A short timeout for request messages, in routers that are started afterwards."""
    monkeypatch.setattr("router.api.rpc.MESSAGE_SECONDS", 0.05)


@pytest.fixture
async def begin_call(ring, start, monkeypatch):
    """A router, and the calls that it has admitted so far."""
    calls = []

    async def admit(call):
        calls.append(call)
        return Principal()

    monkeypatch.setattr("router.access.access.Authenticator.admit", lambda self, call, admin=False: admit(call))
    ring.add_engine()
    ring.add_detokenizer()
    return await start(), calls


class Retried:
    """A call with this number of previous attempts."""

    def __init__(self, previous: str) -> None:
        self._previous = previous
        self.trailers: dict[str, str | bytes] = {}

    def invocation_metadata(self):
        return (("grpc-previous-rpc-attempts", self._previous),) if self._previous else ()

    async def abort(self, code, message, trailers) -> None:
        self.trailers = dict(trailers)
        raise grpc.aio.AbortError


async def pushback(code: ErrorCode, previous: str = "") -> int | None:
    call = Retried(previous)
    with pytest.raises(grpc.aio.AbortError):
        await abort(call, RequestError(code, "no"))
    milliseconds = call.trailers.get("grpc-retry-pushback-ms")
    return None if milliseconds is None else int(milliseconds)


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_the_pushback_of_each_error_agrees_with_its_retry_info(code):
    milliseconds = await pushback(code)
    if code.retry_after is not None:
        assert 1000 * code.retry_after <= milliseconds <= 2000 * code.retry_after
    else:
        # A status that no policy retries must not count towards the channel's retry throttling.
        assert milliseconds == (-1 if code.status in ("RESOURCE_EXHAUSTED", "UNAVAILABLE") else None)


async def test_the_pushback_grows_with_each_attempt_and_is_random():
    pauses = [await pushback(ErrorCode.OVERLOADED, previous) for previous in ("", "1", "2", "3", "4")]
    assert all(1000 * 2**i <= pause <= 2000 * 2**i for i, pause in enumerate(pauses))
    for too_many in ("5", "999999999"):
        assert 16_000 <= await pushback(ErrorCode.OVERLOADED, too_many) <= 32_000
    for nonsense in ("-1", "x", "\u00b2", "\u0663", "1.5", "9" * 5000):
        assert 1000 <= await pushback(ErrorCode.OVERLOADED, nonsense) <= 2000
    assert len({await pushback(ErrorCode.OVERLOADED) for _ in range(50)}) > 10


@pytest.mark.quick(1)
@pytest.mark.slow
@pytest.mark.parametrize("connections", [1, 4])
async def test_each_of_thousands_of_concurrent_calls_gets_a_response_of_the_router(ring, start, connections):
    """By default gRPC cancels calls beyond 1,000 to 3,000 that wait for the server."""
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(max_open=1)
    address, local = f"127.0.0.1:{client.router.port}", [("grpc.use_local_subchannel_pool", 1)]
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, local)) for _ in range(connections)
        ]
        stubs = [HealthStub(channel) for channel in channels]
        calls = [stubs[i % connections].Check(health_pb2.HealthCheckRequest()) for i in range(4000)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert {getattr(answer, "status", answer) for answer in answers} == {health_pb2.HealthCheckResponse.SERVING}


async def test_resumed_tokens_are_queued_and_charged_like_prompt_tokens(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    ring.script = hang
    client = await start(max_live=1, max_waiting=100, max_waiting_tokens=1000)
    admission = client.router.ring.admission
    resume = [pb.ResumeFrom(index=0, token_ids=[5] * 500), pb.ResumeFrom(index=1, token_ids=[5] * 300)]
    sampling = SamplingParams(temperature=0)
    long = pb.GenerationSpec(token_ids=pb.TokenIds(ids=[5] * 100), n=2, resume=resume, sampling=sampling)
    first = client.stream(long, metadata=(("x-sluice-tenant", "t"),))
    await first.read()
    assert admission.shares._served["t"] == 900
    second = client.stream(long)
    reading = asyncio.ensure_future(second.read())
    await client.until(lambda: admission.waiting == 1)
    assert admission.waiting_tokens == 900
    assert (await refused(client.events(long))).info.reason == "OVERLOADED"
    first.cancel()
    second.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_waiting_prompt_tokens_are_bounded(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    ring.script = hang
    client = await start(max_live=1, max_waiting=100, max_waiting_tokens=1000)
    long = pb.GenerationSpec(token_ids=pb.TokenIds(ids=[5] * 600))
    first = client.stream(long)
    await first.read()
    second = client.stream(long)
    reading = asyncio.ensure_future(second.read())
    await client.until(lambda: client.router.ring.admission.waiting_tokens == 600)
    assert (await refused(client.events(long))).info.reason == "OVERLOADED"
    first.cancel()
    second.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_the_engines_capacity_limits_live_requests(ring, start):
    ring.add_engine().stats = StepStats(max_requests=2, tokens_per_kv_block=16)
    ring.add_detokenizer()
    ring.script = hang
    client = await start()
    calls = [client.stream(text_spec()) for _ in range(3)]
    readings = [asyncio.ensure_future(call.read()) for call in calls]
    await client.until(lambda: client.router.ring.admission.waiting == 1 and len(ring.calls) >= 2)
    assert len(ring.calls) == 2
    for call in calls:
        call.cancel()
    await asyncio.gather(*readings, return_exceptions=True)


async def test_texts_that_wait_for_the_tokenizer_are_bounded(ring, start, monkeypatch):
    monkeypatch.setattr("router.text.fair_threads.MAX_WAITING", 4)
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(text_threads=1)
    may_continue = threading.Event()
    threads = client.router._text._threads
    busy = [asyncio.ensure_future(threads.run(lambda: may_continue.wait(60), 1, later=True)) for _ in range(2)]
    await client.until(lambda: threads.unfinished == 2)
    call = client.generation.Tokenize(pb.TokenizeRequest(text="x"))
    assert (await refused(call)).code == StatusCode.RESOURCE_EXHAUSTED
    may_continue.set()
    assert await asyncio.gather(*busy) == [True, True]
    assert (await client.generation.Tokenize(pb.TokenizeRequest(text="x"))).token_ids


async def test_bytes_of_texts_that_wait_for_the_tokenizer_are_bounded(ring, start, monkeypatch):
    monkeypatch.setattr("router.text.fair_threads.MAX_WAITING_BYTES", 2000)
    monkeypatch.setattr("router.text.tokenizer_pool.INLINE_BYTES", 0)
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(text_threads=1)
    may_continue = threading.Event()
    threads = client.router._text._threads
    busy = asyncio.ensure_future(threads.run(lambda: may_continue.wait(60), 900))
    await client.until(lambda: threads.unfinished == 1)
    chat = pb.GenerationSpec(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x" * 101)]))
    for spec in (text_spec(text="x" * 101), chat):
        details = await refused(client.events(spec))
        assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert details.retry is not None
    small = asyncio.ensure_future(client.events(text_spec(text="x" * 100)))
    await client.until(lambda: threads.unfinished == 2)
    may_continue.set()
    assert await busy
    assert (await small)[-1].HasField("done")
    # A single text may have any length.
    assert (await client.events(text_spec(text="x " * 1600)))[-1].HasField("done")
    assert threads._bytes.total == 0


@pytest.mark.parametrize("calls", [6_000, pytest.param(20_000, marks=pytest.mark.long)])
async def test_many_health_checks_of_one_connection_at_once(start, calls):
    """gRPC resets calls of a client that reaches its limit of concurrent calls."""
    client = await start(wait=False)
    health = HealthStub(client.channel)
    answers = await asyncio.gather(*(health.Check(health_pb2.HealthCheckRequest()) for _ in range(calls)))
    assert len(answers) == calls
