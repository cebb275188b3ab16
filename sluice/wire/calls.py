"""Calls of a named method on the ranks of engines, and their answers. Arguments and values are sent as JSON."""

import json
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sluice.wire.message import Message, Name, Number

MAX_JSON_BYTES = 1 << 16
"""Maximum size of all arguments of a call together, and of the value of one rank."""
MAX_METHOD_CHARS = 128
MAX_RANKS = 1024
"""Maximum number of ranks of one engine."""
MAX_ERROR_CHARS = 2000

MethodName = Annotated[str, Meta(max_length=MAX_METHOD_CHARS)]
Json = Annotated[str, Meta(max_length=MAX_JSON_BYTES)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
ErrorText = Annotated[str, Meta(max_length=MAX_ERROR_CHARS)]


class MethodCall(msgspec.Struct, frozen=True, array_like=True):
    """The call `method(rank, *args, **kwargs)` on some ranks."""

    method: MethodName
    args: Json = "[]"
    kwargs: Json = "{}"
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=MAX_RANKS)] = ()
    """Empty: all ranks."""

    def names(self, rank: int) -> bool:
        """Whether the method is to be called on this rank."""
        return not self.ranks or rank in self.ranks


class RankAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The value that a rank returned, or its error."""

    rank: Rank | None
    """None for an error of the whole engine."""
    value: Json | None = None
    error: ErrorText = ""


class EngineCall(Message, frozen=True):
    """router → engine: run a method between two steps, and answer with `CallAnswer`."""

    engine_epoch: Number
    number: Number
    """Random; identifies this call in the answer."""
    router: Name
    """Address of the inbox for the answer."""
    call: MethodCall


class CallAnswer(Message, frozen=True):
    """engine → router on the side lane: the answer to `EngineCall`."""

    engine_epoch: Number
    number: Number
    answers: Annotated[list[RankAnswer], Meta(max_length=MAX_RANKS)]
    """In the order of the ranks."""


def failed(rank: int | None, error: str) -> RankAnswer:
    return RankAnswer(rank, error=error[:MAX_ERROR_CHARS])


def parse_json(text: str) -> Any:
    """Raises ValueError, also for excessive nesting and for NaN and infinities, which Python's JSON parser accepts."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def to_json(value: object) -> str:
    """JSON in ASCII, so that every character is one byte. Raises TypeError, ValueError."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
