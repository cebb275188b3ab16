"""Log lines of refused requests: what they contain, and what they never contain."""

import asyncio

import pytest

from router.peers.adapters import Adapters
from sluice.v1 import generation_pb2 as pb
from sluice.v1.sampling_pb2 import SamplingParams, StoppingCriteria
from tests.router.conftest import refused, text_spec

CANARY = "quokka"


def chat(message: pb.ChatMessage, **fields) -> pb.GenerationSpec:
    return pb.GenerationSpec(chat=pb.ChatPrompt(messages=[message], **fields))


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("spec", "outcome", "fields", "reason"),
    [
        (
            text_spec(sampling=SamplingParams(temperature=2.5, top_p=9)),
            "INVALID_ARGUMENT",
            ["spec.sampling.temperature", "spec.sampling.top_p"],
            "spec.sampling.temperature: is 2.5, must be in [0, 2] (and 1 more)",
        ),
        (
            text_spec(prompt_adapter_id="p"),
            "ADAPTER_NOT_FOUND",
            ["spec.prompt_adapter_id"],
            "it quotes the request",
        ),
        (
            text_spec(stopping=StoppingCriteria(max_tokens=2048)),
            "CONTEXT_OVERFLOW",
            ["spec.stopping.max_tokens"],
            "more than the context of 2048 tokens",
        ),
    ],
)
async def test_the_log_line_of_a_refused_request(client, spec, outcome, fields, reason, streaming):
    await refused(client.events(spec) if streaming else client.generate(spec))
    (line,) = client.lines()
    assert (line["outcome"], line["fields"]) == (outcome, fields)
    assert reason in line["reason"]
    assert line["peer"].startswith(("ipv4:127.0.0.1:", "ipv6:"))


async def test_the_log_line_of_a_served_request_names_no_client(client):
    await client.events(text_spec())
    (line,) = client.lines()
    assert not {"fields", "reason", "peer"} & line.keys()


async def test_the_log_line_of_a_call_that_is_cancelled_before_its_request_is_known(client, monkeypatch):
    waiting = asyncio.Event()

    async def settle(*_) -> None:
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Adapters, "settle", settle)
    call = client.stream(text_spec(lora_id="x", request_id="early"))
    await waiting.wait()
    call.cancel()
    await client.until(client.lines)
    (line,) = client.lines()
    assert (line["request_id"], line["outcome"]) == ("early", "CANCELLED")
    assert client.router.ring.counters.requests["CANCELLED", "CANCELLED"] == 1


async def test_the_log_line_of_a_request_whose_parsing_fails_unexpectedly(client, monkeypatch):
    monkeypatch.setattr("router.requests.pipeline.parse", None)
    await refused(client.events(text_spec(request_id="odd")))
    (line,) = client.lines()
    assert (line["request_id"], line["outcome"]) == ("odd", "INTERNAL")
    assert client.router.ring.counters.requests["INTERNAL", "INTERNAL"] == 1


QUOTING = {
    "model": text_spec(model=CANARY),
    "role": chat(pb.ChatMessage(role=CANARY)),
    "role of a tool's answer": chat(pb.ChatMessage(role=CANARY, tool_call_id="c")),
    "tools": chat(pb.ChatMessage(role="user"), tools_json=f"{{{CANARY}}}"),
    "variable": chat(pb.ChatMessage(role="user"), template_kwargs={"add_generation_prompt": CANARY}),
    "text": text_spec(CANARY, sampling=SamplingParams(temperature=9)),
    "stop": text_spec(stopping=StoppingCriteria(stop=[CANARY * 1000])),
}


@pytest.mark.parametrize("spec", QUOTING.values(), ids=QUOTING)
async def test_no_log_line_quotes_the_caller(client, spec):
    await refused(client.events(spec))
    (line,) = client.lines()
    assert line["reason"]
    assert CANARY not in repr(client.logs)


async def test_the_log_line_of_many_invalid_fields_is_short(client):
    spec = text_spec(sampling=SamplingParams(logit_bias=dict.fromkeys(range(5000, 6000), 1000.0)))
    await refused(client.events(spec))
    (line,) = client.lines()
    assert len(line["fields"]) == 8
    assert len(repr(line)) < 2000


@pytest.mark.parametrize("n", [1, 2])
async def test_all_tokens_of_a_unary_response_are_delivered(client, n):
    await client.generate(text_spec(n=n))
    (line,) = client.lines()
    assert (line["completion_tokens"], line["undelivered_tokens"]) == (24 * n, 0)
