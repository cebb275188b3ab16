"""The HTTP gateway of a real ring, by OpenAI's own client and by bytes."""

import asyncio
import json
import os
import signal
import threading
import time

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from sluice import AsyncClient, Client
from sluice.client import Unavailable
from sluice.launch import Ring
from tests.fakes.ports import free_ports
from tests.fakes.processes import wait_until

USER = [{"role": "user", "content": "def fibonacci(n):"}]
SEEDED = {"model": "tiny", "seed": 7, "max_tokens": 24}
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def ring():
    port = free_ports(3)
    parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    with Ring(detokenizers=1, routers=2, port=port, http_port=port + 2, gateway_args=parsers) as ring:
        yield ring


@pytest.fixture(scope="module")
def url(ring) -> str:
    return f"http://{ring.http_address}/v1"


@pytest.fixture(scope="module")
def client(url):
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(url):
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "sluice"


async def test_whole_and_streamed_are_the_same(client, async_client):
    whole = client.chat.completions.create(messages=USER, **SEEDED)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens == 24
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


async def test_completions(client, async_client):
    found = client.completions.create(prompt="def f(n):", n=2, logprobs=1, echo=True, **SEEDED)
    first, second = found.choices
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


def test_scores_of_a_batch_of_token_ids(ring, client):
    """As lm-eval asks for log-likelihoods."""
    prompts = [[300, 301, 302], [303, 304]]
    found = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1
    )
    with Client(ring.addresses) as direct:
        for prompt, choice in zip(prompts, found.choices, strict=True):
            own = direct.generate(prompt, max_tokens=1, prompt_logprobs=1, temperature=0)
            scores = [entry.logprob for entry in own.prompt_logprobs]
            assert choice.logprobs.token_logprobs[0] is None
            assert choice.logprobs.token_logprobs[:-1] == pytest.approx(scores, abs=1e-4)
            assert len(choice.logprobs.tokens) == len(prompt) + 1


def test_the_best_of_several(ring, client):
    found = client.completions.create(prompt="def f(n):", best_of=5, n=2, **SEEDED)
    with Client(ring.addresses) as direct:
        best = direct.generate("def f(n):", best_of=5, n=2, seed=7, max_tokens=24)
    assert [choice.text for choice in found.choices] == [output.text for output in best.outputs]
    assert found.usage.completion_tokens == best.usage.completion_tokens == 5 * 24
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(prompt="x", best_of=1000, **SEEDED)
    assert refused.value.param == "best_of"


def test_logprobs_of_a_chat(client):
    found = client.chat.completions.create(messages=USER, logprobs=True, top_logprobs=2, **SEEDED)
    tokens = found.choices[0].logprobs.content
    assert len(tokens) == 24
    assert b"".join(bytes(each.bytes) for each in tokens).decode() == found.choices[0].message.content
    assert all(len(each.top_logprobs) == 2 for each in tokens)


def test_a_stop_string(client):
    whole = client.chat.completions.create(messages=USER, **SEEDED).choices[0].message.content
    stop = whole[5:8]
    found = client.chat.completions.create(messages=USER, stop=[stop], **SEEDED).choices[0]
    assert found.message.content == whole[: whole.index(stop)]
    assert found.finish_reason == "stop"


def test_structured_outputs(client):
    class Answer(BaseModel):
        good: bool
        kind: str

    schema = Answer.model_json_schema() | {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    schema["properties"]["kind"]["maxLength"] = 4
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    options = SEEDED | {"max_tokens": 64}
    found = client.chat.completions.create(messages=USER, response_format=form, **options)
    assert isinstance(Answer.model_validate_json(found.choices[0].message.content).good, bool)
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


def test_tools_that_must_be_called(client):
    options = SEEDED | {"max_tokens": 128}
    named = {"type": "function", "function": {"name": "subtract"}}
    found = client.chat.completions.create(messages=USER, tools=TOOLS, tool_choice=named, **options).choices[0]
    (call,) = found.message.tool_calls
    assert (found.finish_reason, found.message.content, call.function.name) == ("tool_calls", None, "subtract")
    assert json.loads(call.function.arguments)["n"] in (1, 2)
    chunks = client.chat.completions.create(
        messages=USER, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=True, **options
    )
    deltas = [choice for chunk in chunks for choice in chunk.choices]
    parts = [call for choice in deltas for call in choice.delta.tool_calls or ()]
    assert parts[0].function.name in ("add", "subtract")
    assert json.loads("".join(part.function.arguments or "" for part in parts))["n"] in (1, 2)
    assert deltas[-1].finish_reason == "tool_calls"
    answer = [
        *USER,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    assert client.chat.completions.create(messages=answer, tools=TOOLS, **SEEDED).choices[0].finish_reason


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
def test_errors_by_class(client, fields, kind, param):
    for stream in (False, True):
        with pytest.raises(kind) as error:
            client.chat.completions.create(**({"messages": USER, **SEEDED} | fields), stream=stream)
        assert error.value.param == param


def test_a_request_id_is_that_of_the_ring(ring, client):
    found = client.chat.completions.with_raw_response.create(
        messages=USER, extra_headers={"x-request-id": "mine-1"}, **SEEDED
    )
    assert found.headers["x-request-id"] == "mine-1"
    assert found.parse().id == "chatcmpl-mine-1"


async def test_leaving_a_stream_cancels_it(ring, async_client):
    stream = await async_client.chat.completions.create(
        model="tiny", messages=USER, stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    with Client(ring.addresses) as asked:

        def idle() -> bool:
            return all(engine.active_requests == 0 for engine in asked.stats().engines)

        assert await asyncio.to_thread(wait_until, idle)


async def test_streams_survive_the_death_of_their_router(ring, url):
    """16 streams, and SIGKILL for the router that they go through: none is broken, each is as if nothing had been."""
    body = {"model": "tiny", "messages": USER, "max_tokens": 300, "ignore_eos": True, "stream": True}
    first = threading.Event()

    async def read(http: httpx.AsyncClient, seed: int, wait: float = 0.0) -> tuple[str, bool]:
        text, done = "", False
        async with http.stream("POST", f"{url}/chat/completions", json=body | {"seed": seed}, timeout=90) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += event["choices"][0]["delta"].get("content", "")
                    if len(text) > 40:
                        first.set()
        return text, done

    async with httpx.AsyncClient() as http:
        calm = await asyncio.gather(*(read(http, seed) for seed in range(16)))
        first.clear()
        streams = [asyncio.create_task(read(http, seed)) for seed in range(16)]
        while not first.is_set():
            await asyncio.sleep(0.01)
        pids = ring.pids
        for router in ("router-0", "router-1"):
            os.kill(pids[router], signal.SIGKILL)
        killed = time.monotonic()
        assert await asyncio.gather(*streams) == calm
        print(f"all ended {time.monotonic() - killed:.1f} s after the kill")
    assert all(done for _, done in calm)
    assert await asyncio.to_thread(wait_until, lambda: are_back(ring, pids, "router-0", "router-1"))


def are_back(ring: Ring, former: dict[str, int], *killed: str) -> bool:
    """Whether others took the place of these, and all routers serve."""
    return all(ring.pids[name] != former[name] for name in killed) and all(map(serves, ring.addresses))


def serves(address: str) -> bool:
    with Client(address) as client:
        try:
            return client.health()
        except Unavailable:
            return False


@pytest.mark.timeout(300)
async def test_whole_answers_survive_the_death_of_their_router(ring, url):
    """8 answers that are not streamed, and SIGKILL for the router that many of their tokens have gone through."""
    body = {"model": "tiny", "prompt": "def f(n):", "max_tokens": 1500, "ignore_eos": True}

    async def ask(http: httpx.AsyncClient, seed: int) -> str:
        # Every other one is the best of two.
        count = 1 + seed % 2
        found = await http.post(f"{url}/completions", json=body | {"seed": seed, "best_of": count}, timeout=200)
        assert found.status_code == 200, found.text
        assert found.json()["usage"]["completion_tokens"] == 1500 * count
        return found.json()["choices"][0]["text"]

    async def busy() -> int:
        """Which router has brought some of its requests a part of the way."""
        while True:
            for number, router in enumerate(routers):
                requests = (await router.stats()).requests
                if any(each.open and each.completion_tokens >= 300 for each in requests):
                    return number
            await asyncio.sleep(0.01)

    routers = [AsyncClient(address) for address in ring.addresses]
    async with httpx.AsyncClient() as http, routers[0], routers[1]:
        calm = await asyncio.gather(*(ask(http, seed) for seed in range(8)))
        answers = [asyncio.create_task(ask(http, seed)) for seed in range(8)]
        pids = ring.pids
        name = f"router-{await busy()}"
        assert not any(answer.done() for answer in answers)
        os.kill(pids[name], signal.SIGKILL)
        assert await asyncio.gather(*answers) == calm
    assert await asyncio.to_thread(wait_until, lambda: are_back(ring, pids, name))


def test_a_gateway_that_is_killed_comes_back_at_its_address(ring, client):
    former = ring.pids["gateway"]
    os.kill(former, signal.SIGKILL)

    def back() -> bool:
        try:
            return ring.pids["gateway"] != former and httpx.get(f"http://{ring.http_address}/health").status_code == 200
        except httpx.TransportError:
            return False

    assert wait_until(back)
    assert client.chat.completions.create(messages=USER, **SEEDED).choices
