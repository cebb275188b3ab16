"""OpenAI's client: chats, completions, streams, tools, structured outputs, log-probabilities, errors."""

import json
from typing import Literal

import openai
from checks import KEY, LONG, MODEL, QUESTION, SECOND_TURN, URL, WEATHER, raised, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
USER = [{"role": "user", "content": QUESTION}]
ASK = {"model": MODEL, "messages": USER, "max_tokens": 8, "temperature": 0}
ONE_CALL = {**ASK, "max_tokens": 80, "parallel_tool_calls": False}


class Answer(BaseModel):
    fish: bool
    kind: Literal["mammal", "fish"]


def models():
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve(MODEL).id == MODEL


def chat():
    answer = client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason == "length", answer
    assert answer.usage.completion_tokens == 8 and answer.model == MODEL, answer


def chat_stream_with_usage():
    *chunks, last = client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage.completion_tokens == 8, last


def stream_is_the_whole_answer():
    whole = client.chat.completions.create(**ASK).choices[0].message.content
    stream = client.chat.completions.create(**ASK, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


def stream_helper():
    # It takes an answer that max_tokens cut short for an error, so the answer is one that ends.
    with client.chat.completions.stream(**ASK, extra_body={"guided_choice": ["yes", "no"]}) as stream:
        kinds = {event.type for event in stream}
        assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
        assert stream.get_final_completion().choices[0].message.content in ("yes", "no")


async def asynchronous():
    async with AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as other:
        assert (await other.chat.completions.create(**ASK)).choices[0].message.content
        stream = await other.chat.completions.create(**ASK, stream=True)
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"


def several_and_seed():
    first, second = (client.chat.completions.create(**{**ASK, "temperature": 1}, n=2, seed=3).choices for _ in range(2))
    assert [choice.index for choice in first] == [0, 1]
    assert [choice.message.content for choice in first] == [choice.message.content for choice in second]


def stop():
    wanted = {**ASK, "max_tokens": 40}
    text = client.chat.completions.create(**wanted).choices[0].message.content
    word = text.split()[2]
    (choice,) = client.chat.completions.create(**wanted, stop=[word]).choices
    assert choice.finish_reason == "stop" and choice.message.content == text.partition(word)[0], choice


def logprobs():
    (choice,) = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3).choices
    assert len(choice.logprobs.content) == 8, choice
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3 and token.logprob == token.top_logprobs[0].logprob, token
    assert "".join(token.token for token in choice.logprobs.content).strip() == choice.message.content.strip()


def completion():
    answer = client.completions.create(model=MODEL, prompt=["def f(", "def g("], max_tokens=4, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1] and answer.usage.completion_tokens == 8, answer
    assert all(len(choice.logprobs.tokens) == 4 for choice in answer.choices)


def completion_stream():
    chunks = list(client.completions.create(model=MODEL, prompt="def f(", max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


def tools_auto():
    (choice,) = client.chat.completions.create(**ASK, tools=[WEATHER]).choices
    assert choice.message.content or choice.message.tool_calls, choice


def tools_required():
    (choice,) = client.chat.completions.create(**ONE_CALL, tools=[WEATHER], tool_choice="required").choices
    call = choice.message.tool_calls[0]
    assert choice.finish_reason == "tool_calls" and call.id and call.function.name == "weather", choice
    assert list(json.loads(call.function.arguments)) == ["city"], call


def tools_named_as_a_stream():
    named = {"type": "function", "function": {"name": "weather"}}
    stream = list(client.chat.completions.create(**ONE_CALL, tools=[WEATHER], tool_choice=named, stream=True))
    parts = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert parts[0].id and parts[0].function.name == "weather", parts
    arguments = "".join(part.function.arguments or "" for part in parts)
    assert list(json.loads(arguments)) == ["city"], arguments
    assert stream[-1].choices[0].finish_reason == "tool_calls"


def tools_second_turn():
    answer = client.chat.completions.create(model=MODEL, messages=SECOND_TURN, tools=[WEATHER], max_tokens=8)
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls, answer


def parse():
    answer = client.chat.completions.parse(**{**ASK, "max_tokens": 60}, response_format=Answer)
    assert isinstance(answer.choices[0].message.parsed, Answer), answer


def parse_a_call():
    tool = openai.pydantic_function_tool(Answer)
    answer = client.chat.completions.parse(**ONE_CALL, tools=[tool], tool_choice="required")
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Answer), answer


def json_object():
    wanted = {**ASK, "max_tokens": 60}
    (choice,) = client.chat.completions.create(**wanted, response_format={"type": "json_object"}).choices
    # The grammar permits objects of any length, which max_tokens may cut short.
    assert choice.message.content.lstrip().startswith("{"), choice
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict), choice


def fields_of_vllm():
    (choice,) = client.chat.completions.create(**ASK, extra_body={"guided_choice": ["yes", "no"], "top_k": 5}).choices
    assert choice.message.content in ("yes", "no"), choice


def context_length_exceeded():
    long = [{"role": "user", "content": LONG}]
    error = raised(openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=long))
    assert error.code == "context_length_exceeded" and error.param == "messages", error.body


def wrong_field():
    error = raised(openai.BadRequestError, lambda: client.chat.completions.create(**{**ASK, "temperature": 9}))
    assert error.param == "temperature", error.body


def unknown_model():
    error = raised(openai.NotFoundError, lambda: client.chat.completions.create(**{**ASK, "model": "other"}))
    assert error.code == "model_not_found", error.body


def no_responses_and_embeddings():
    raised(openai.NotFoundError, lambda: client.responses.create(model=MODEL, input="x"))
    raised(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="x"))


run(
    *(models, chat, chat_stream_with_usage, stream_is_the_whole_answer, stream_helper, asynchronous, several_and_seed),
    *(stop, logprobs, completion, completion_stream, tools_auto, tools_required, tools_named_as_a_stream),
    *(tools_second_turn, parse, parse_a_call, json_object, fields_of_vllm, context_length_exceeded, wrong_field),
    *(unknown_model, no_responses_and_embeddings),
)
