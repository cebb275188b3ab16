"""LiteLLM: completion, acompletion, streams, tools, structured outputs and text completions, and its errors."""

import json
from functools import partial
from typing import Literal

import litellm
from checks import KEY, LONG, MODEL, QUESTION, SECOND_TURN, URL, WEATHER, raised, run
from pydantic import BaseModel

litellm.suppress_debug_info = True
SERVER = {"api_base": URL, "api_key": KEY, "num_retries": 0}
USER = [{"role": "user", "content": QUESTION}]
PROVIDERS = ("openai", "hosted_vllm")
TEXT = f"text-completion-openai/{MODEL}"


class Answer(BaseModel):
    fish: bool
    kind: Literal["mammal", "fish"]


def ask(provider="openai", messages=USER, max_tokens=8, temperature=0, **more):
    return litellm.completion(
        f"{provider}/{MODEL}", messages, max_tokens=max_tokens, temperature=temperature, **SERVER, **more
    )


def chat():
    for provider in PROVIDERS:
        answer = ask(provider)
        assert answer.choices[0].message.content and answer.usage.completion_tokens == 8, answer
        assert answer.choices[0].finish_reason == "length", answer


def stream_with_usage():
    for provider in PROVIDERS:
        chunks = list(ask(provider, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[-1].usage.completion_tokens == 8, chunks[-1]


def stream_chunk_builder():
    whole = litellm.stream_chunk_builder(list(ask(stream=True)), messages=USER)
    assert whole.choices[0].message.content and whole.choices[0].finish_reason == "length", whole


async def asynchronous():
    for provider in PROVIDERS:
        wanted = {"model": f"{provider}/{MODEL}", "messages": USER, "max_tokens": 8, "temperature": 0, **SERVER}
        assert (await litellm.acompletion(**wanted)).choices[0].message.content
        stream = await litellm.acompletion(**wanted, stream=True)
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"


async def asynchronous_tools():
    for provider in PROVIDERS:
        wanted = {
            "max_tokens": 60,
            "parallel_tool_calls": False,
            "tools": [WEATHER],
            "tool_choice": "required",
            **SERVER,
        }
        answer = await litellm.acompletion(f"{provider}/{MODEL}", USER, **wanted)
        assert answer.choices[0].message.tool_calls[0].function.name == "weather", answer


def batch():
    answers = litellm.batch_completion(f"openai/{MODEL}", [USER, USER], max_tokens=4, **SERVER)
    assert all(answer.choices[0].message.content for answer in answers), answers


def several_seed_and_stop():
    first, second = (ask(n=2, seed=3, temperature=1).choices for _ in range(2))
    assert [choice.message.content for choice in first] == [choice.message.content for choice in second]
    assert len(first) == 2
    text = ask(max_tokens=40).choices[0].message.content
    word = text.split()[2]
    assert ask(max_tokens=40, stop=[word]).choices[0].message.content == text.partition(word)[0]


def logprobs():
    tokens = ask(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(tokens) == 8 and len(tokens[0].top_logprobs) == 2, tokens


def tools_auto():
    for provider in PROVIDERS:
        message = ask(provider, tools=[WEATHER]).choices[0].message
        assert message.content or message.tool_calls, message


def tools_required():
    for provider in PROVIDERS:
        one = {"max_tokens": 60, "parallel_tool_calls": False}
        (choice,) = ask(provider, tools=[WEATHER], tool_choice="required", **one).choices
        call = choice.message.tool_calls[0].function
        assert choice.finish_reason == "tool_calls" and list(json.loads(call.arguments)) == ["city"], choice


def tools_named_as_a_stream():
    named = {"type": "function", "function": {"name": "weather"}}
    chunks = list(ask(max_tokens=60, tools=[WEATHER], tool_choice=named, stream=True))
    whole = litellm.stream_chunk_builder(chunks, messages=USER)
    call = whole.choices[0].message.tool_calls[0].function
    assert call.name == "weather" and list(json.loads(call.arguments)) == ["city"], whole


def tools_second_turn():
    message = ask(messages=SECOND_TURN, tools=[WEATHER]).choices[0].message
    assert message.content or message.tool_calls, message


def structured_by_a_model():
    for provider in PROVIDERS:
        answer = ask(provider, max_tokens=60, response_format=Answer).choices[0].message.content
        assert Answer.model_validate_json(answer)


def structured_by_json_object():
    answer = ask(max_tokens=40, response_format={"type": "json_object"}).choices[0].message.content
    assert answer.lstrip().startswith("{"), answer


def fields_of_vllm():
    for provider in PROVIDERS:
        answer = ask(provider, extra_body={"guided_choice": ["yes", "no"], "top_k": 5}).choices[0].message.content
        assert answer in ("yes", "no"), answer


def text_completion():
    answer = litellm.text_completion(model=TEXT, prompt="def f(", max_tokens=4, **SERVER)
    assert answer.choices[0].text and answer.usage.completion_tokens == 4, answer
    chunks = list(litellm.text_completion(model=TEXT, prompt="def f(", max_tokens=4, stream=True, **SERVER))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks)


async def asynchronous_text_completion():
    answer = await litellm.atext_completion(model=TEXT, prompt=["def f(", "def g("], max_tokens=4, **SERVER)
    assert len(answer.choices) == 2, answer


def router():
    model = {"model_name": "small", "litellm_params": {"model": f"openai/{MODEL}", **SERVER}}
    router = litellm.Router([model], num_retries=0)
    assert router.completion("small", USER, max_tokens=4).choices[0].message.content


def context_window_exceeded():
    long = [{"role": "user", "content": LONG}]
    for provider in PROVIDERS:
        raised(litellm.ContextWindowExceededError, partial(ask, provider, long))


def context_window_exceeded_in_a_stream():
    long = [{"role": "user", "content": LONG}]
    raised(litellm.ContextWindowExceededError, lambda: list(ask(messages=long, stream=True)))


def wrong_field():
    error = raised(litellm.BadRequestError, lambda: ask(temperature=9))
    assert "temperature" in str(error), error


def unknown_model():
    raised(litellm.NotFoundError, lambda: litellm.completion("openai/other", USER, **SERVER))


def no_embeddings():
    raised(litellm.NotFoundError, lambda: litellm.embedding(f"openai/{MODEL}", ["x"], **SERVER))


run(
    *(chat, stream_with_usage, stream_chunk_builder, asynchronous, asynchronous_tools, batch, several_seed_and_stop),
    *(logprobs, tools_auto, tools_required, tools_named_as_a_stream, tools_second_turn, structured_by_a_model),
    *(structured_by_json_object, fields_of_vllm, text_completion, asynchronous_text_completion, router),
    *(context_window_exceeded, context_window_exceeded_in_a_stream, wrong_field, unknown_model, no_embeddings),
)
