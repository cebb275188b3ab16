"""The HTTP gateway of a real ring, through OpenAI's own client."""

import asyncio
import json

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from sluice import Client
from tests.fakes.processes import wait_until
from tests.system.gateway.conftest import SEEDED, USER

pytestmark = pytest.mark.process


@pytest.fixture
async def async_client(url):
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_models_can_be_listed_and_retrieved(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "sluice"


async def test_a_streamed_chat_equals_an_unstreamed_one(client, async_client):
    answer = client.chat.completions.create(messages=USER, **SEEDED)
    text = answer.choices[0].message.content
    assert text
    assert answer.usage.completion_tokens == 24
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=USER, **options, **SEEDED))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert chunks[-1].usage.completion_tokens == 24
    choice = {"model": "tiny", "messages": USER, "extra_body": {"guided_choice": ["yes", "no"]}}
    async with async_client.chat.completions.stream(**choice) as helper:
        kinds = {event.type async for event in helper}
        final = (await helper.get_final_completion()).choices[0]
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.message.content in ("yes", "no")
    assert final.finish_reason == "stop"


async def test_completions_have_logprobs_and_echo_and_can_be_streamed(client, async_client):
    answer = client.completions.create(prompt="def f(n):", n=2, logprobs=1, echo=True, **SEEDED)
    first, second = answer.choices
    assert first.text.startswith("def f(n):")
    assert first.logprobs.token_logprobs[0] is None
    assert "".join(first.logprobs.tokens) == first.text
    assert all(value <= 0 for value in first.logprobs.token_logprobs[1:])
    offsets = zip(first.logprobs.text_offset, first.logprobs.tokens, strict=True)
    assert all(first.text[at:].startswith(token) for at, token in offsets)
    assert second.index == 1
    texts = ["", ""]
    async for chunk in await async_client.completions.create(
        prompt="def f(n):", n=2, logprobs=1, echo=True, stream=True, **SEEDED
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [first.text, second.text]


def test_a_batch_of_token_ids_is_scored(ring, client):
    """The request with which lm-eval computes log-likelihoods."""
    prompts = [[300, 301, 302], [303, 304]]
    answer = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1
    )
    with Client(ring.addresses) as direct:
        for prompt, choice in zip(prompts, answer.choices, strict=True):
            result = direct.generate(prompt, max_tokens=1, prompt_logprobs=1, temperature=0)
            scores = [entry.logprob for entry in result.prompt_logprobs]
            assert choice.logprobs.token_logprobs[0] is None
            assert choice.logprobs.token_logprobs[:-1] == pytest.approx(scores, abs=1e-4)
            assert len(choice.logprobs.tokens) == len(prompt) + 1


def test_best_of_returns_the_best_outputs(ring, client):
    answer = client.completions.create(prompt="def f(n):", best_of=5, n=2, **SEEDED)
    with Client(ring.addresses) as direct:
        best = direct.generate("def f(n):", best_of=5, n=2, seed=7, max_tokens=24)
    assert [choice.text for choice in answer.choices] == [output.text for output in best.outputs]
    assert answer.usage.completion_tokens == best.usage.completion_tokens == 5 * 24
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(prompt="x", best_of=1000, **SEEDED)
    assert refused.value.param == "best_of"


def test_chats_have_logprobs(client):
    answer = client.chat.completions.create(messages=USER, logprobs=True, top_logprobs=2, **SEEDED)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 24
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == answer.choices[0].message.content
    assert all(len(token.top_logprobs) == 2 for token in tokens)


def test_a_stop_string_ends_the_answer(client):
    text = client.chat.completions.create(messages=USER, **SEEDED).choices[0].message.content
    stop = text[5:8]
    answer = client.chat.completions.create(messages=USER, stop=[stop], **SEEDED).choices[0]
    assert answer.message.content == text[: text.index(stop)]
    assert answer.finish_reason == "stop"


def test_answers_match_their_guide(client):
    class Answer(BaseModel):
        good: bool
        kind: str

    schema = Answer.model_json_schema() | {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    schema["properties"]["kind"]["maxLength"] = 4
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    options = SEEDED | {"max_tokens": 64}
    answer = client.chat.completions.create(messages=USER, response_format=form, **options)
    assert isinstance(Answer.model_validate_json(answer.choices[0].message.content).good, bool)
    chosen = client.chat.completions.create(messages=USER, extra_body={"guided_choice": ["yes", "no"]}, **options)
    assert chosen.choices[0].message.content in ("yes", "no")
    assert chosen.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=USER, extra_body={"guided_regex": "("}, **options)
    assert refused.value.param == "guided_regex"


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"n": {"enum": [1, 2]}},
                "required": ["n"],
                "additionalProperties": False,
                "x-guidance": {"whitespace_flexible": False},
            },
        },
    }
    for name in ("add", "subtract")
]


def test_required_tools_are_called(client):
    options = SEEDED | {"max_tokens": 128}
    named = {"type": "function", "function": {"name": "subtract"}}
    answer = client.chat.completions.create(messages=USER, tools=TOOLS, tool_choice=named, **options).choices[0]
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, answer.message.content, call.function.name) == ("tool_calls", None, "subtract")
    assert json.loads(call.function.arguments)["n"] in (1, 2)
    chunks = client.chat.completions.create(
        messages=USER, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=True, **options
    )
    deltas = [choice for chunk in chunks for choice in chunk.choices]
    parts = [call for choice in deltas for call in choice.delta.tool_calls or ()]
    assert parts[0].function.name in ("add", "subtract")
    assert json.loads("".join(part.function.arguments or "" for part in parts))["n"] in (1, 2)
    assert deltas[-1].finish_reason == "tool_calls"
    with_result = [
        *USER,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    assert client.chat.completions.create(messages=with_result, tools=TOOLS, **SEEDED).choices[0].finish_reason


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"stop": [""]}, openai.BadRequestError, "stop[0]"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, openai.BadRequestError, "messages"),
        ({"logit_bias": {"999999": 1}}, openai.BadRequestError, "logit_bias[999999]"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs"),
    ],
)
def test_invalid_fields_raise_the_exceptions_of_openai(client, fields, kind, param):
    for stream in (False, True):
        with pytest.raises(kind) as error:
            client.chat.completions.create(**({"messages": USER, **SEEDED} | fields), stream=stream)
        assert error.value.param == param


def test_the_request_id_of_the_client_is_used(ring, client):
    answer = client.chat.completions.with_raw_response.create(
        messages=USER, extra_headers={"x-request-id": "mine-1"}, **SEEDED
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.parse().id == "chatcmpl-mine-1"


async def test_closing_a_stream_cancels_the_request(ring, async_client):
    stream = await async_client.chat.completions.create(
        model="tiny", messages=USER, stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    with Client(ring.addresses) as direct:

        def idle() -> bool:
            return all(engine.active_requests == 0 for engine in direct.stats().engines)

        assert await asyncio.to_thread(wait_until, idle)
