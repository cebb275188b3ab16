"""Completions and chats against a scripted router: the requests it gets, and the responses."""

import json
import statistics
from typing import Any

import grpc
import pytest

from tests.fakes.breaking_routers import GONE, Plan, run_routers
from tests.fakes.failures import Failure, bad_request
from tests.fakes.gateway import running

USER = [{"role": "user", "content": "hi"}]


async def test_a_completion(gateway, script):
    script.stop_string = "!"
    answer = (await gateway.post("/v1/completions", model="tiny", prompt="x", max_tokens=5)).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "Hello, world", "stop")
    assert (choice["logprobs"], choice["stop_reason"]) == (None, "!")
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert script.seen[-1].spec.text == "x"
    assert script.seen[-1].spec.stopping.max_tokens == 5


async def test_a_chat(gateway, script):
    script.stop_string = "!"
    answer = (await gateway.post("/v1/chat/completions", model="tiny", messages=USER)).json()
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"content": "Hello, world", "role": "assistant", "refusal": None}
    assert choice["finish_reason"] == "stop"
    (message,) = script.seen[-1].spec.chat.messages
    assert (message.role, message.content) == ("user", "hi")
    assert not script.seen[-1].spec.stopping.HasField("max_tokens")


async def test_the_ring_keeps_the_tags_of_parsers_if_they_are_special_tokens(address, script):
    async with running(address, tool_parser="hermes") as gateway:
        tools = [{"type": "function", "function": {"name": "f"}}]
        for fields, tags in [({}, []), ({"tools": tools}, ["<tool_call>", "</tool_call>"])]:
            await gateway.post("/v1/chat/completions", messages=USER, **fields)
            assert list(script.seen[-1].spec.output.keep_special_tokens) == tags


@pytest.mark.parametrize("streams", [False, True])
async def test_reasoning_whose_opening_tag_is_written_by_the_chat_template(address, script, streams):
    script.texts, script.prompt_tail = ["hm</thi", "nk>\n\nyes"], "<|im_start|>assistant\n<think>\n"
    async with running(address, reasoning_parser="qwen3") as gateway:
        body = {"messages": USER, "n": 2, "stream": streams}
        messages = [{"content": "", "reasoning_content": ""} for _ in range(2)]
        for choice in await choices_of(gateway, body):
            for name in ("content", "reasoning_content"):
                messages[choice["index"]][name] += choice.get("delta", choice.get("message")).get(name) or ""
    assert messages == [{"content": "yes", "reasoning_content": "hm"}] * 2
    assert script.seen[-1].spec.output.prompt_tail == 16


async def test_the_prompts_end_is_requested_only_for_reasoning(address, script):
    async with running(address, reasoning_parser="qwen3") as gateway:
        await gateway.post("/v1/chat/completions", messages=USER, response_format={"type": "json_object"})
        assert script.seen[-1].spec.output.prompt_tail == 0


@pytest.mark.parametrize("streams", [False, True])
async def test_a_json_answer_beside_tools_may_contain_the_tag_of_calls(address, script, streams):
    script.texts = ['{"x": "<tool_call>', '{\\"name\\": \\"f\\"}</tool_call>"}']
    async with running(address, tool_parser="hermes") as gateway:
        tools = [{"type": "function", "function": {"name": "f"}}]
        body = {"messages": USER, "tools": tools, "response_format": {"type": "json_object"}, "stream": streams}
        choices = [choice.get("delta", choice.get("message")) for choice in await choices_of(gateway, body)]
    assert "".join(choice.get("content") or "" for choice in choices) == "".join(script.texts)
    assert not any("tool_calls" in choice for choice in choices)


async def choices_of(gateway, body):
    answer = await gateway.post("/v1/chat/completions", **body)
    if not body["stream"]:
        return answer.json()["choices"]
    events = [data.removeprefix("data: ") for data in answer.text.split("\n\n")[:-2]]
    return [choice for data in events for choice in json.loads(data)["choices"]]


@pytest.mark.parametrize("texts", [["Hello", ", ", "world"], []])
async def test_only_the_first_chunk_of_each_choice_has_the_role(gateway, script, texts):
    """Clients concatenate the strings of deltas, so a second role would spoil the message; without one it has none."""
    script.texts = texts
    choices = await choices_of(gateway, {"messages": USER, "n": 2, "stream": True})
    for index in range(2):
        first, *others = [choice["delta"] for choice in choices if choice["index"] == index]
        assert first == {"role": "assistant", "content": ""}
        assert [delta.get("content") for delta in others] == [*texts, None]
        assert not any("role" in delta for delta in others)


async def test_the_bytes_of_a_stream(gateway):
    answer = await gateway.post(
        "/v1/chat/completions",
        model="tiny",
        messages=USER,
        stream=True,
        stream_options={"include_usage": True},
        headers={"x-request-id": "r7"},
    )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(data.removeprefix("data: ")) for data in events[:-2]]
    assert all((chunk["id"], chunk["object"]) == ("chatcmpl-r7", "chat.completion.chunk") for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": ", "},
        {"content": "world"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 4 + ["length"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 5
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 6


async def test_a_stream_of_a_completion(gateway):
    *chunks, done = await gateway.events("/v1/completions", prompt="x")
    assert done == "[DONE]"
    assert [each["choices"][0]["text"] for each in chunks] == ["Hello", ", ", "world", ""]
    assert "usage" not in chunks[0]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_the_usage_so_far_in_each_chunk(gateway):
    """guidellm always asks for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = await gateway.events("/v1/completions", prompt="x", stream_options=options)
    assert [each["usage"]["completion_tokens"] for each in chunks] == [1, 2, 3, 3, 3]
    assert [each["usage"]["total_tokens"] for each in chunks] == [4, 5, 6, 6, 6]


async def test_an_echo_without_an_output():
    with run_routers(1, Plan()) as addresses:
        async with running(addresses) as gateway:
            body = {"prompt": "p", "echo": True, "logprobs": 1, "max_tokens": 0, "seed": 5}
            answer = (await gateway.post("/v1/completions", **body)).json()
            chunks = await gateway.events("/v1/completions", **body, stream_options={"include_usage": True})
            whole = (await gateway.post("/v1/completions", **body | {"max_tokens": 1})).json()
    (choice,), (longer,) = answer["choices"], whole["choices"]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
    assert longer["text"].startswith(choice["text"])
    assert len(longer["text"]) > len(choice["text"]) > 0
    assert len(choice["logprobs"]["tokens"]) == len(longer["logprobs"]["tokens"]) - 1
    *parts, total, done = chunks
    assert ("".join(part["choices"][0]["text"] for part in parts), done) == (choice["text"], "[DONE]")
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert total["usage"]["completion_tokens"] == 0


async def test_several_prompts(gateway, script):
    answer = await gateway.post("/v1/completions", prompt=["x", "y"], headers={"x-request-id": "r"})
    assert [item["index"] for item in answer.json()["choices"]] == [0, 1]
    assert answer.json()["usage"]["total_tokens"] == 12
    assert sorted((request.spec.text, request.spec.request_id) for request in script.seen) == [
        ("x", "r-0"),
        ("y", "r-1"),
    ]
    chunks = await gateway.events("/v1/completions", prompt=[[1, 2], [3]])
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "Hello, world", 1: "Hello, world"}
    assert sorted(tuple(request.spec.token_ids.ids) for request in script.seen[-2:]) == [(1, 2), (3,)]


async def test_one_of_several_prompts_fails(gateway, script):
    script.failure, script.fail_after = Failure(grpc.StatusCode.INTERNAL), 2
    chunks = await gateway.events("/v1/completions", prompt=["x", "y"])
    assert chunks[-1]["error"]["message"] == "it failed"


@pytest.mark.parametrize(
    ("body", "events"),
    [
        ({"prompt": "p", "logprobs": 1, "echo": True}, 4),
        ({"prompt": ["p", "q"], "n": 2}, 4),
        ({"prompt": "p", "n": 2, "best_of": 3, "echo": True}, 8),
    ],
)
async def test_a_whole_answer_is_resumed_at_the_next_router(body, events):
    """`events`: number of events before the router is lost."""
    plan = Plan()
    with run_routers(2, plan) as addresses:
        async with running(addresses) as gateway:

            async def complete() -> Any:
                answer = await gateway.post("/v1/completions", seed=5, max_tokens=9, **body)
                assert answer.status_code == 200, answer.text
                return answer.json() | {"id": "", "created": 0}

            uninterrupted = await complete()
            plan.breaks.append((events, GONE))
            assert await complete() == uninterrupted
    resumed = [spec for _, spec in plan.seen if spec.resume]
    assert [sum(len(resume.token_ids) for resume in spec.resume) > 0 for spec in resumed] == [True]


@pytest.mark.parametrize("options", [{}, {"logprobs": 1}])
async def test_best_of_returns_the_most_likely_outputs(options):
    plan = Plan()
    with run_routers(1, plan) as addresses:
        async with running(addresses) as gateway:
            answer = await gateway.post(
                "/v1/completions", prompt="p", seed=160, max_tokens=9, n=2, best_of=3, **options
            )
            all_outputs = await gateway.post("/v1/completions", prompt="p", seed=160, max_tokens=9, n=3, logprobs=1)
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [choice["logprobs"] is None for choice in choices] == [not options] * 2
    ranked = sorted(
        all_outputs.json()["choices"], key=lambda choice: -statistics.fmean(choice["logprobs"]["token_logprobs"])
    )
    assert [choice["index"] for choice in ranked] != sorted(choice["index"] for choice in ranked)
    assert [choice["text"] for choice in choices] == [choice["text"] for choice in ranked[:2]]
    assert answer.json()["usage"] == all_outputs.json()["usage"]
    assert (plan.seen[0][1].n, plan.seen[0][1].HasField("best_of")) == (3, False)


async def test_errors_of_n_name_best_of(gateway, script):
    script.failure = bad_request("spec.n", "is 999, must be in [1, 128]")
    error = (await gateway.post("/v1/completions", prompt="x", best_of=999)).json()["error"]
    assert (error["param"], error["message"]) == ("best_of", "best_of: is 999, must be in [1, 128]")
    error = (await gateway.post("/v1/completions", prompt="x", n=999)).json()["error"]
    assert error["param"] == "n"


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, [2]], [["a"]], 7, None, ["x"] * 300])
async def test_no_prompt(gateway, script, prompt):
    answer = await gateway.post("/v1/completions", prompt=prompt)
    assert (answer.status_code, answer.json()["error"]["param"].partition("[")[0]) == (400, "prompt")
    assert not script.seen


async def test_the_callers_headers_are_forwarded(gateway, script):
    headers = {"authorization": "Bearer s3cret", "traceparent": "00-ab-cd-01", "x-request-id": "r-1", "cookie": "no"}
    answer = await gateway.post("/v1/completions", prompt="x", headers=headers)
    assert answer.headers["x-request-id"] == "r-1"
    assert script.seen[-1].spec.request_id == "r-1"
    forwarded = script.metadata[-1]
    assert (forwarded["authorization"], forwarded["traceparent"]) == ("Bearer s3cret", "00-ab-cd-01")
    assert "cookie" not in forwarded
    answer = await gateway.post("/v1/completions", prompt="x")
    assert answer.headers["x-request-id"] == script.seen[-1].spec.request_id != ""
    assert "authorization" not in script.metadata[-1]


@pytest.mark.parametrize(
    ("name", "value"), [("x-request-id", "a b"), ("x-request-id", "x" * 200), ("authorization", "Bearer ü")]
)
async def test_invalid_headers_are_refused(gateway, script, name, value):
    answer = await gateway.http.post("/v1/completions", json={"prompt": "x"}, headers=[(name.encode(), value.encode())])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert not script.seen
