"""Runs the checks of a client program, and writes a line per check: `ok NAME`, or `failed NAME: why`.

The programs run in environments of their own, without pytest and this repository: PROGRAM BASE_URL MODEL
"""

import asyncio
import inspect
import sys
from collections.abc import Callable
from typing import Any

URL, MODEL = sys.argv[1:3]
KEY = "none"
QUESTION = "Tell me about whales."
LONG = "word " * 9000
"""Longer than the model's context of 8192 tokens."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
SECOND_TURN: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain, 7 degrees."},
]

Check = Callable[[], Any]


def run(*checks: Check) -> None:
    for check in checks:
        try:
            answer = check()
            if inspect.iscoroutine(answer):
                asyncio.run(answer)
        # Whatever a client raises is the failure of this check alone.
        except Exception as error:  # noqa: BLE001
            why = " ".join(f"{type(error).__name__}: {error}".split())
            line = f"failed {check.__name__}: {why[:600]}"
        else:
            line = f"ok {check.__name__}"
        print(line, flush=True)


def raised(kind: type[Exception], call: Check) -> Any:
    """The exception that the call must raise."""
    try:
        answer = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {answer!r}")
