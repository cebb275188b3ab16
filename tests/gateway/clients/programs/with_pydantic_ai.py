"""pydantic-ai: agents with text, tools and structured outputs in each mode, streams, limits and errors."""

from typing import Literal

from checks import KEY, LONG, MODEL, QUESTION, URL, raised, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.exceptions import ModelContextWindowExceededError, ModelHTTPError, UnexpectedModelBehavior
from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart, UserPromptPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

SHORT = {"max_tokens": 8, "temperature": 0.0}
LONGER = {"max_tokens": 100, "temperature": 0.0}


def model(name=MODEL):
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=URL, api_key=KEY))


class Answer(BaseModel):
    fish: bool
    kind: Literal["mammal", "fish"]


text = Agent(model(), model_settings=SHORT)


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"Rain in {city}."


def run_sync():
    result = text.run_sync(QUESTION)
    assert result.output and result.usage.output_tokens == 8, result


async def asynchronous():
    assert (await text.run(QUESTION)).output


async def stream():
    async with text.run_stream(QUESTION) as result:
        parts = [part async for part in result.stream_text(delta=True)]
        assert "".join(parts) and result.usage.output_tokens == 8, result.usage


def history():
    first = text.run_sync(QUESTION)
    assert text.run_sync("Why?", message_history=first.all_messages()).output


def instructions():
    assert Agent(model(), instructions="You are brief.", model_settings=SHORT).run_sync(QUESTION).output


def settings():
    more = {"stop_sequences": ["zzz"], "seed": 3, "top_p": 0.9, "logit_bias": {"5": -100}, "parallel_tool_calls": False}
    assert text.run_sync(QUESTION, model_settings={**SHORT, **more, "presence_penalty": 0.1}).output


def logprobs():
    result = text.run_sync(QUESTION, model_settings={**SHORT, "openai_logprobs": True, "openai_top_logprobs": 2})
    details = result.all_messages()[-1].provider_details
    assert len(details["logprobs"]) == 8, details


def output_by_a_tool():
    agent = Agent(model(), output_type=ToolOutput(Answer), model_settings={**LONGER, "parallel_tool_calls": False})
    assert isinstance(agent.run_sync(QUESTION).output, Answer)


def output_by_the_server():
    agent = Agent(model(), output_type=NativeOutput(Answer), model_settings=LONGER)
    assert isinstance(agent.run_sync(QUESTION).output, Answer)


async def output_by_the_server_as_a_stream():
    agent = Agent(model(), output_type=NativeOutput(Answer), model_settings=LONGER)
    async with agent.run_stream(QUESTION) as result:
        assert isinstance([part async for part in result.stream_output()][-1], Answer)


def output_by_the_prompt():
    agent = Agent(model(), output_type=PromptedOutput(Answer), model_settings=LONGER, retries=0)
    try:
        assert isinstance(agent.run_sync(QUESTION).output, Answer)
    except UnexpectedModelBehavior as error:
        # The server enforces JSON. The schema is in the prompt alone, so an answer that does not fit it is the model's.
        assert not isinstance(error, ModelHTTPError), error


def tools_auto():
    result = Agent(model(), tools=[weather], model_settings=SHORT).run_sync(QUESTION)
    assert result.output


def tools_required():
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    tools = ModelRequestParameters(
        function_tools=[ToolDefinition(name="weather", parameters_json_schema=schema)], allow_text_output=False
    )
    settings = {**LONGER, "parallel_tool_calls": False, "tool_choice": "required"}
    question = [ModelRequest.user_text_prompt("Weather in Oslo?")]
    answer = model_request_sync(model(), question, model_settings=settings, model_request_parameters=tools)
    (call,) = answer.tool_calls
    assert call.tool_name == "weather" and list(call.args_as_dict()) == ["city"], call


def second_turn():
    call = ToolCallPart("weather", {"city": "Oslo"}, tool_call_id="call_1")
    past = [ModelRequest([UserPromptPart("Weather in Oslo?")]), ModelResponse([call])]
    past.append(ModelRequest([ToolReturnPart("weather", "Rain.", tool_call_id="call_1")]))
    assert Agent(model(), tools=[weather], model_settings=SHORT).run_sync("Thanks", message_history=past).output


def context_window_exceeded():
    error = raised(ModelContextWindowExceededError, lambda: text.run_sync(LONG))
    assert error.status_code == 400, error


def unknown_model():
    error = raised(ModelHTTPError, lambda: Agent(model("other")).run_sync("Hi"))
    assert error.status_code == 404, error


run(
    *(run_sync, asynchronous, stream, history, instructions, settings, logprobs, output_by_a_tool),
    *(output_by_the_server, output_by_the_server_as_a_stream, output_by_the_prompt, tools_auto, tools_required),
    *(second_turn, context_window_exceeded, unknown_model),
)
