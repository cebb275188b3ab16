"""instructor: models of pydantic in each mode that it has for servers of OpenAI's API, partial and several objects."""

from collections.abc import Iterable
from typing import Literal

import instructor
import openai
from checks import KEY, LONG, MODEL, QUESTION, URL, raised, run
from instructor import Mode
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ValidationError

server = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
ASK = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 80, "temperature": 0}
UNFIT = (IncompleteOutputException, InstructorRetryException, ValidationError)
"""What instructor raises for the answer of a model that was asked for JSON, but did not write what was asked."""


class Answer(BaseModel):
    fish: bool
    kind: Literal["mammal", "fish"]


def create(mode, response_model=Answer, **more):
    wanted = {**ASK, "max_retries": 0, **more}
    return instructor.from_openai(server, mode=mode).create(response_model=response_model, **wanted)


def mode_tools():
    assert isinstance(create(Mode.TOOLS), Answer)


def mode_tools_strict():
    assert isinstance(create(Mode.TOOLS_STRICT), Answer)


def mode_json_schema():
    assert isinstance(create(Mode.JSON_SCHEMA), Answer)


def asks_only(call):
    """What is asked for is in the prompt alone, so an answer that does not fit it is the model's; errors are not."""
    try:
        assert call()
    except UNFIT as error:
        assert not isinstance(error.__cause__, openai.APIError), error


def mode_json():
    asks_only(lambda: create(Mode.JSON))


def mode_md_json():
    asks_only(lambda: create(Mode.MD_JSON))


def mode_parallel_tools():
    # It leaves to the model whether it calls a tool.
    asks_only(lambda: list(create(Mode.PARALLEL_TOOLS, Iterable[Answer])))


def retries_keep_the_conversation():
    # No answer is accepted, so instructor asks again with the call and the error in messages.
    def refuse(*_):
        raise ValueError("say mammal")

    wanted = type("Refused", (Answer,), {"model_post_init": refuse})
    error = raised(UNFIT, lambda: create(Mode.TOOLS, wanted, max_retries=1))
    assert "say mammal" in str(error) and not isinstance(error.__cause__, openai.APIError), error


def with_completion():
    client = instructor.from_openai(server, mode=Mode.TOOLS)
    answer, completion = client.create_with_completion(response_model=Answer, **ASK)
    assert isinstance(answer, Answer) and completion.usage.completion_tokens > 0, completion


def partial_stream():
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        *_, last = instructor.from_openai(server, mode=mode).create_partial(response_model=Answer, **ASK)
        assert last.fish is not None and last.kind in ("mammal", "fish"), last


def iterable():
    class City(BaseModel):
        name: Literal["Oslo", "Rome"]

    # The list may go on until max_tokens, but its whole objects arrive before.
    cities = instructor.from_openai(server, mode=Mode.TOOLS).create_iterable(response_model=City, **ASK)
    assert isinstance(next(iter(cities)), City)


async def asynchronous():
    async with AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as other:
        for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
            client = instructor.from_openai(other, mode=mode)
            assert isinstance(await client.create(response_model=Answer, **ASK), Answer)


def context_length_exceeded():
    error = raised(InstructorRetryException, lambda: create(Mode.TOOLS, messages=[{"role": "user", "content": LONG}]))
    assert "context_length_exceeded" in str(error), error


run(
    *(mode_tools, mode_tools_strict, mode_json_schema, mode_json, mode_md_json, mode_parallel_tools),
    *(retries_keep_the_conversation, with_completion, partial_stream, iterable, asynchronous),
    context_length_exceeded,
)
