"""LangChain's ChatOpenAI: calls, batches, streams, tools, structured outputs in each method, token counts, errors."""

from typing import Literal

import openai
from checks import KEY, LONG, MODEL, QUESTION, URL, raised, run
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

SERVER = {"base_url": URL, "api_key": KEY, "model": MODEL, "max_retries": 0, "temperature": 0}
short = ChatOpenAI(**SERVER, max_tokens=8)
longer = ChatOpenAI(**SERVER, max_tokens=80)


class Answer(BaseModel):
    """The answer to the question."""

    fish: bool
    kind: Literal["mammal", "fish"]


class City(BaseModel):
    city: str = Field(max_length=12)


@tool(args_schema=City)
def weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}."


def invoke():
    answer = short.invoke(QUESTION)
    assert answer.content and answer.usage_metadata["output_tokens"] == 8, answer
    assert answer.response_metadata["finish_reason"] == "length", answer


def batch():
    answers = short.batch(["Hi", "Ho", QUESTION])
    assert len(answers) == 3 and all(answer.content for answer in answers)


async def asynchronous():
    assert (await short.ainvoke(QUESTION)).content
    assert len(await short.abatch(["Hi", "Ho"])) == 2
    assert "".join([chunk.content async for chunk in short.astream(QUESTION)])
    kinds = {event["event"] async for event in short.astream_events(QUESTION, version="v2")}
    assert {"on_chat_model_stream", "on_chat_model_end"} <= kinds, kinds


def stream_with_usage():
    chunks = list(ChatOpenAI(**SERVER, max_tokens=8, stream_usage=True).stream(QUESTION))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content and total.usage_metadata["output_tokens"] == 8, total


def chain():
    prompt = ChatPromptTemplate.from_messages([("system", "You are brief."), ("human", "{question}")])
    assert (prompt | short | StrOutputParser()).invoke({"question": QUESTION})


def usage_callback():
    counter = UsageMetadataCallbackHandler()
    short.invoke(QUESTION, config={"callbacks": [counter]})
    assert counter.usage_metadata[MODEL]["output_tokens"] == 8, counter.usage_metadata


def logprobs():
    answer = short.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    tokens = answer.response_metadata["logprobs"]["content"]
    assert len(tokens) == 8 and len(tokens[0]["top_logprobs"]) == 2, tokens


def several_and_stop():
    generations = ChatOpenAI(**SERVER, max_tokens=8, n=2).generate([[HumanMessage(QUESTION)]]).generations[0]
    assert len(generations) == 2
    text = longer.invoke(QUESTION).content
    word = text.split()[2]
    assert longer.invoke(QUESTION, stop=[word]).content == text.partition(word)[0]


def bind_tools_auto():
    answer = short.bind_tools([weather]).invoke(QUESTION)
    assert answer.content or answer.tool_calls or answer.invalid_tool_calls, answer


def bind_tools_any():
    bound = longer.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke("Weather in Oslo?").tool_calls
    assert call["name"] == "weather" and list(call["args"]) == ["city"], call


def bind_tools_named_as_a_stream():
    chunks = list(longer.bind_tools([weather], tool_choice="weather").stream("Weather in Oslo?"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    (call,) = total.tool_calls
    assert call["name"] == "weather" and list(call["args"]) == ["city"], total


def second_turn():
    call = {"name": "weather", "args": {"city": "Oslo"}, "id": "call_1", "type": "tool_call"}
    result = ToolMessage(weather.invoke({"city": "Oslo"}), tool_call_id="call_1")
    messages = [HumanMessage("Weather in Oslo?"), AIMessage("", tool_calls=[call]), result]
    answer = short.bind_tools([weather]).invoke(messages)
    assert answer.content or answer.tool_calls or answer.invalid_tool_calls, answer


def structured_by_json_schema():
    assert isinstance(longer.with_structured_output(Answer, method="json_schema").invoke(QUESTION), Answer)


def structured_by_json_schema_as_a_stream():
    assert isinstance(list(longer.with_structured_output(Answer, method="json_schema").stream(QUESTION))[-1], Answer)


def structured_by_function_calling():
    assert isinstance(longer.with_structured_output(Answer, method="function_calling").invoke(QUESTION), Answer)


def structured_by_json_mode():
    # The mode enforces JSON, not the schema, so the answer may be another object, or one that max_tokens cuts short.
    asked = longer.with_structured_output(Answer, method="json_mode", include_raw=True)
    try:
        text = asked.invoke(f"{QUESTION} Answer in JSON.")["raw"].content
    except openai.LengthFinishReasonError as error:
        text = error.completion.choices[0].message.content
    assert text.lstrip().startswith("{"), text


def text_completions():
    llm = OpenAI(**SERVER, max_tokens=4)
    assert llm.invoke("def f(") and "".join(llm.stream("def f(")) and len(llm.batch(["def f(", "def g("])) == 2


def token_counts():
    # For an unknown model it takes a tokenizer of OpenAI, which it would download: give it that of the server.
    counting = ChatOpenAI(**SERVER, custom_get_token_ids=lambda text: list(text.encode()))
    assert counting.get_num_tokens("four") == 4


def context_overflow():
    error = raised(ContextOverflowError, lambda: short.invoke(LONG))
    assert error.code == "context_length_exceeded", error


def context_overflow_of_a_stream():
    raised(ContextOverflowError, lambda: list(short.stream(LONG)))


def unknown_model():
    raised(openai.NotFoundError, lambda: ChatOpenAI(**SERVER | {"model": "other"}).invoke("Hi"))


def no_embeddings():
    embeddings = OpenAIEmbeddings(
        base_url=URL, api_key=KEY, model=MODEL, max_retries=0, check_embedding_ctx_length=False
    )
    raised(openai.NotFoundError, lambda: embeddings.embed_query("x"))


run(
    *(invoke, batch, asynchronous, stream_with_usage, chain, usage_callback, logprobs, several_and_stop),
    *(bind_tools_auto, bind_tools_any, bind_tools_named_as_a_stream, second_turn, structured_by_json_schema),
    *(structured_by_json_schema_as_a_stream, structured_by_function_calling, structured_by_json_mode),
    *(text_completions, token_counts, context_overflow, context_overflow_of_a_stream, unknown_model, no_embeddings),
)
