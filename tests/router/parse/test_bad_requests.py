"""Every invalid request gets its documented status and field, and does not affect other streams."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.encoder import TagBytes, _VarintBytes
from grpc import StatusCode

from router.errors import Reason
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from sluice.v1.sampling_pb2 import SamplingParams, StoppingCriteria
from tests.fakes.ring_scripts import generate
from tests.router.conftest import Details, refused, text_spec
from tests.router.parse.bad_specs import SPECS
from tests.router.parse.spec_builders import INVALID, UNBUILT, VOCABULARY, ids, nested_variables, sampling

REASONS = {
    INVALID: {"INVALID_ARGUMENT", "CONTEXT_OVERFLOW"},
    StatusCode.NOT_FOUND: {"ADAPTER_NOT_FOUND"},
    StatusCode.PERMISSION_DENIED: {"FORBIDDEN"},
}


def check(details: Details, code, field):
    assert details.code is code, details.error
    assert details.info.domain == "sluice"
    assert details.retry is None
    if field is None:
        assert details.info.reason == "MODEL_NOT_FOUND"
        return
    assert details.info.reason in REASONS[code]
    assert field in details.fields, details.fields
    assert field in details.error.details()
    assert all(violation.description for violation in details.bad.field_violations)
    reasons = {violation.field: violation.reason for violation in details.bad.field_violations}
    assert details.info.metadata[field] == reasons[field]
    assert reasons[field] in Reason.__members__
    assert len(details.error.details()) <= 400


async def test_each_invalid_request_gets_its_status_and_field_while_streams_continue(client, ring):
    assert len(SPECS) >= 60
    ring.script = lambda call: generate(call, pause=0.01, most=200)
    undisturbed = [asyncio.ensure_future(client.events(text_spec())) for _ in range(16)]
    for name, spec, code, field in SPECS:
        for rpc in (client.events(spec, timeout=60), client.generate(spec, timeout=60)):
            try:
                check(await refused(rpc), code, field)
            except BaseException as error:
                raise AssertionError(name) from error
    for events in await asyncio.gather(*undisturbed):
        assert events[-1].done.usage.completion_tokens == 200
    assert len(ring.calls) == 16
    assert not client.router.ring.requests.open


async def test_all_violations_are_reported_together(client):
    spec = pb.GenerationSpec(
        request_id="?",
        sampling=SamplingParams(temperature=9, top_p=9),
        stopping=StoppingCriteria(stop=[""], max_tokens=0),
        n=0,
    )
    fields = (await refused(client.events(spec))).fields
    assert set(fields) == {
        "spec.request_id",
        "spec.prompt",
        "spec.sampling.temperature",
        "spec.sampling.top_p",
        "spec.stopping.max_tokens",
        "spec.stopping.stop[0]",
        "spec.n",
    }


async def test_a_message_that_protobuf_cannot_decode_may_be_nested_too_deeply(client):
    data = nested_variables(40).SerializeToString()
    for number in (3, 16, 1):
        data = TagBytes(number, 2) + _VarintBytes(len(data)) + data
    details = await refused(client.channel.unary_unary("/sluice.v1.GenerationService/Generate")(data))
    assert details.code is INVALID
    assert "it is malformed or nested too deeply" in details.error.details()


async def test_very_many_violations_fit_the_metadata(client):
    spec = sampling(logit_bias=dict.fromkeys(range(5000, 6000), 1000.0))
    details = await refused(client.events(spec))
    assert len(details.fields) > 20
    assert "more" in details.bad.field_violations[-1].description


async def test_values_and_limits_are_named(client):
    details = await refused(client.events(sampling(temperature=2.5)))
    assert details.bad.field_violations[0].description == "is 2.5, must be in [0, 2]"
    details = await refused(client.events(ids(*[5] * 2000, stopping=StoppingCriteria(max_tokens=49))))
    assert details.info.reason == "CONTEXT_OVERFLOW"
    assert "2000" in details.error.details()
    assert "2048" in details.error.details()
    assert "KV cache" not in details.error.details()


async def test_the_engines_limit_is_the_context(ring, start):
    ring.add_engine().max_sequence_tokens = 100
    ring.add_detokenizer()
    client = await start()
    details = await refused(client.events(ids(*[5] * 60, stopping=StoppingCriteria(max_tokens=41))))
    assert (details.info.reason, details.fields) == ("CONTEXT_OVERFLOW", ["spec.stopping.max_tokens"])
    limit = "the context of 100 tokens that the engines accept (the model's is 2048)"
    assert limit in details.error.details()
    await client.events(ids(*[5] * 60))
    assert ring.calls[0].submit.stopping.max_tokens == 40
    info = await client.models.GetModelInfo(admin_pb2.GetModelInfoRequest())
    assert info.model.max_context_tokens == 100


async def test_bytes_that_are_not_a_message_and_text_that_is_not_utf8(client):
    raw = client.channel.unary_unary("/sluice.v1.GenerationService/Generate")
    for data in (
        b"\xff\xff\xff\xff",
        pb.GenerateRequest(spec=text_spec("AAAA")).SerializeToString().replace(b"AAAA", b"\xff" * 4),
    ):
        details = await refused(raw(data))
        assert (details.code, details.info.reason) == (INVALID, "INVALID_ARGUMENT")


async def test_a_call_without_a_spec(client):
    details = await refused(client.generation.Generate(pb.GenerateRequest()))
    assert details.fields == ["spec.prompt"]


async def test_a_message_beyond_the_limit(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(max_message_bytes=1 << 17)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.generate(text_spec("x" * (1 << 18)))
    assert error.value.code() is StatusCode.RESOURCE_EXHAUSTED


def chat_of(text="", role="user", image=False):
    parts = [pb.ContentPart(image=pb.Image(data=b"x"))] if image else []
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=role, content=text, parts=parts)])


@pytest.mark.parametrize(
    ("method", "request_message", "code", "field"),
    [
        ("Tokenize", pb.TokenizeRequest(text="x" * 3_000_000), INVALID, "text"),
        ("Tokenize", pb.TokenizeRequest(model="other"), StatusCode.NOT_FOUND, None),
        ("Tokenize", pb.TokenizeRequest(chat=pb.ChatPrompt()), INVALID, "chat.messages"),
        ("Tokenize", pb.TokenizeRequest(chat=chat_of("x"), text="x"), INVALID, "text"),
        ("Tokenize", pb.TokenizeRequest(chat=chat_of("x"), offsets=True), INVALID, "offsets"),
        ("Tokenize", pb.TokenizeRequest(chat=chat_of("x", role="boss")), INVALID, "chat.messages[0].role"),
        ("Tokenize", pb.TokenizeRequest(chat=chat_of(image=True)), INVALID, "chat.messages"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1, VOCABULARY]), INVALID, "token_ids[1]"),
        ("Detokenize", pb.DetokenizeRequest(model="other"), StatusCode.NOT_FOUND, None),
        ("Abort", pb.AbortRequest(), INVALID, "request_id"),
    ],
)
async def test_the_other_generation_calls(client, method, request_message, code, field):
    check(await refused(getattr(client.generation, method)(request_message)), code, field)


@pytest.mark.parametrize(
    ("service", "method", "message", "code", "field"),
    [
        ("models", "GetModelInfo", admin_pb2.GetModelInfoRequest(model="other"), StatusCode.NOT_FOUND, None),
        ("models", "LoadLora", admin_pb2.LoadLoraRequest(), INVALID, "lora_id"),
        ("models", "LoadLora", admin_pb2.LoadLoraRequest(lora_id="x", path="/x"), UNBUILT, None),
        ("models", "UnloadLora", admin_pb2.UnloadLoraRequest(), StatusCode.NOT_FOUND, "lora_id"),
        ("models", "ListLoras", admin_pb2.ListLorasRequest(page_size=1001), INVALID, "page_size"),
        ("models", "LoadPromptAdapter", admin_pb2.LoadPromptAdapterRequest(), INVALID, "prompt_adapter_id"),
        (
            "models",
            "UnloadPromptAdapter",
            admin_pb2.UnloadPromptAdapterRequest(),
            StatusCode.NOT_FOUND,
            "prompt_adapter_id",
        ),
        ("admin", "Drain", admin_pb2.DrainRequest(timeout=Duration(seconds=-1)), INVALID, "timeout"),
    ],
)
async def test_the_other_services(client, service, method, message, code, field):
    details = await refused(getattr(getattr(client, service), method)(message))
    assert details.code is code
    assert field is None or field in details.error.details()


@pytest.mark.parametrize("milliseconds", [0, 99, -1000])
async def test_statistics_too_often(client, milliseconds):
    interval = Duration()
    interval.FromMilliseconds(milliseconds)
    call = client.admin.StreamStats(admin_pb2.StreamStatsRequest(interval=interval))
    assert (await refused(call.read())).fields == ["interval"]
