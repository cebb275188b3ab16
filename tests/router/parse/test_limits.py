"""Limits of one connection and of one call."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from router.errors import Violations
from router.parse.chat import ChatPrompt
from router.parse.model import Limits, describe, limits_of
from router.parse.prompt import parse_prompt
from sluice.settings.services import RouterSettings
from sluice.v1 import generation_pb2 as pb
from sluice.v1.sampling_pb2 import ChoiceList, GuidedDecoding, SamplingParams, StoppingCriteria
from tests.fakes.http2 import Connection
from tests.fakes.ring_scripts import hang
from tests.router.conftest import Details, refused, rest, text_spec

LOCAL = ("grpc.use_local_subchannel_pool", 1)


@pytest.fixture
async def begin(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    return start


def connect(client, *options):
    return grpc.aio.insecure_channel(f"127.0.0.1:{client.router.port}", [LOCAL, *options])


async def check(channel, timeout=60.0, metadata=None):
    return await HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout, metadata=metadata)


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()


async def test_calls_beyond_the_limit_of_a_connection_wait_at_the_client(begin, ring, monkeypatch):
    monkeypatch.setattr("router.api.listener.MAX_STREAMS", 2)
    ring.script = hang
    client = await begin()
    async with connect(client) as channel:
        watchers = [HealthStub(channel).Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watcher in watchers:
            await watcher.read()
        assert await code_of(check(channel, timeout=0.5)) is StatusCode.DEADLINE_EXCEEDED
        assert await check(client.channel), "the limit applies to each connection separately"
        watchers[0].cancel()
        assert await check(channel)


async def test_connections_beyond_the_limit_are_refused_and_existing_ones_continue(begin):
    client = await begin(max_connections=3)
    await check(client.channel)
    channels = [connect(client) for _ in range(2)]
    for channel in channels:
        await check(channel)
    async with connect(client) as fourth:
        assert await code_of(check(fourth)) is StatusCode.UNAVAILABLE
    await asyncio.gather(*map(check, channels))
    await asyncio.gather(*(channel.close() for channel in channels))
    async with connect(client) as replacement:
        await replacement.channel_ready()
        assert await check(replacement)


async def test_metadata_beyond_the_limit(begin, monkeypatch):
    monkeypatch.setattr("router.api.listener.MAX_METADATA_BYTES", 8192)
    client = await begin()
    assert await check(client.channel, metadata=(("x-note", "a" * 7000),))
    assert await code_of(check(client.channel, metadata=(("x-note", "a" * 9000),))) is StatusCode.RESOURCE_EXHAUSTED
    assert await check(client.channel)


async def test_messages_beyond_the_limit(begin):
    client = await begin(max_message_bytes=1 << 16)
    long = text_spec("a" * (1 << 16))
    for call in (client.generate(long), client.events(long)):
        assert await code_of(call) is StatusCode.RESOURCE_EXHAUSTED
    assert (await client.generate(text_spec())).outputs


@pytest.mark.slow
async def test_a_client_that_pings_too_often_is_disconnected(begin):
    client = await begin()
    often = ("grpc.keepalive_time_ms", 50), ("grpc.keepalive_permit_without_calls", 1)
    async with connect(client, *often, ("grpc.http2.max_pings_without_data", 0)) as channel:
        watcher = HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watcher.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await asyncio.wait_for(watcher.read(), 60)
        assert "Too many pings" in (error.value.details() or "")
    assert await check(client.channel)


PATH = b"/sluice.v1.GenerationService/Generate"
NO_TEXT = b"\xff\xfe\xc3("


@pytest.mark.parametrize(
    ("path", "metadata"),
    [
        (NO_TEXT, ()),
        (b"/" + NO_TEXT, ()),
        (PATH + NO_TEXT, ()),
        (b"", ()),
        (PATH, ((b"x-note", NO_TEXT),)),
        (PATH, ((b"authorization", NO_TEXT),)),
        (PATH, ((b"x-sluice-tenant", NO_TEXT),)),
        (PATH, ((b"x-note-bin", NO_TEXT),)),
        (PATH, ((NO_TEXT, b"x"),)),
        (PATH, ((b"grpc-timeout", NO_TEXT),)),
        (PATH, ((b"grpc-encoding", NO_TEXT),)),
        (PATH, ((b"grpc-encoding", b"gzip"),)),
    ],
)
async def test_bytes_that_are_not_a_call_do_not_affect_others(begin, ring, path, metadata):
    ring.script = hang
    client = await begin()
    call = client.stream(text_spec(request_id="r"))
    await call.read()
    async with Connection(client.router.port) as connection:
        await asyncio.wait_for(connection.call(path, *metadata), 60)
    assert (await client.generation.Abort(pb.AbortRequest(request_id="r"))).aborted
    assert (await rest(call))[-1].HasField("done")
    async with connect(client) as channel:
        assert await check(channel)


async def test_a_call_without_a_message(begin):
    client = await begin()
    call = client.channel.stream_unary("/sluice.v1.GenerationService/Generate")(iter([]))
    details = await refused(call)
    assert (details.code, details.info.reason) == (StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")


async def test_a_message_that_does_not_arrive(begin, monkeypatch):
    monkeypatch.setattr("router.api.rpc.MESSAGE_SECONDS", 0.1)
    client = await begin()
    details = await refused(client.channel.stream_unary("/sluice.v1.GenerationService/Generate")())
    assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "SLOW_CLIENT")


async def test_calls_that_are_cancelled_immediately_log_nothing(begin, ring, caplog, capfd):
    client = await begin()
    calls = [client.stream(text_spec()) for _ in range(200)]
    for i, call in enumerate(calls):
        if i % 2:
            await asyncio.sleep(0)
        call.cancel()
    await asyncio.gather(*(asyncio.wait({asyncio.ensure_future(call.code())}) for call in calls))
    await check(client.channel)
    await client.until(lambda: not client.router.ring.requests.open)
    assert not caplog.records
    assert not client.lines("call_failed")
    assert "Traceback" not in capfd.readouterr().err


LONG = "a" * 101
EMPTY = pb.ChatMessage()


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (text_spec(LONG), "spec.text"),
        (text_spec(stopping=StoppingCriteria(stop=["a"] * 101)), "spec.stopping.stop"),
        (text_spec(stopping=StoppingCriteria(stop=[LONG])), "spec.stopping.stop[0]"),
        (text_spec(stopping=StoppingCriteria(stop_token_ids=range(101))), "spec.stopping.stop_token_ids"),
        (text_spec(sampling=SamplingParams(logit_bias=dict.fromkeys(range(101), 1.0))), "spec.sampling.logit_bias"),
        (text_spec(sampling=SamplingParams(bad_token_ids=range(101))), "spec.sampling.bad_token_ids"),
        (text_spec(sampling=SamplingParams(allowed_token_ids=range(101))), "spec.sampling.allowed_token_ids"),
        (text_spec(guided=GuidedDecoding(regex=LONG)), "spec.guided.regex"),
        (text_spec(guided=GuidedDecoding(json_schema=LONG)), "spec.guided.json_schema"),
        (text_spec(guided=GuidedDecoding(ebnf=LONG)), "spec.guided.ebnf"),
        (text_spec(guided=GuidedDecoding(structural_tag=LONG)), "spec.guided.structural_tag"),
        (text_spec(guided=GuidedDecoding(choice=ChoiceList(choices=["a"] * 101))), "spec.guided.choice.choices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_the_limit_of_each_list_and_text_of_a_request_is_reported(begin, monkeypatch, spec, field):
    limits = ("prompt_bytes", "stop_strings", "stop_bytes", "logit_bias", "listed_ids", "guide_bytes")
    bounded = replace(limits_of(RouterSettings(model="m"), 2048), **dict.fromkeys(limits, 100))
    monkeypatch.setattr("router.app.limits_of", lambda *_: bounded)
    client = await begin()
    details: Details = await refused(client.generate(spec))
    assert (details.code, details.fields) == (StatusCode.INVALID_ARGUMENT, [field])
    assert "at most 100" in details.bad.field_violations[0].description


@pytest.mark.parametrize("chat", [pb.ChatPrompt(messages=[EMPTY] * 101), pb.ChatPrompt(tools_json=f'"{LONG}"')])
def test_a_chat_that_is_too_long_is_not_converted(checkpoint, chat):
    limits = Limits(prompt_bytes=100 if chat.tools_json else 10**6, prompt_ids=1, messages=100)
    model, bad = describe(checkpoint), Violations()
    prompt = parse_prompt(pb.GenerationSpec(chat=chat), model, limits, bad)
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.messages, prompt.tools) == ((), None)
    assert [violation.field for violation in bad.found if "at most 100" in violation.description]
