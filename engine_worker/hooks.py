"""The interface between the engine's core and its driver: four callables, named after TensorRT-LLM's batch manager.

The core calls them in the thread that calls `Engine.step`; none may block. Arguments and results are plain data.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from engine_worker.step import NO_LIMIT
from sluice.wire.errors import Fault
from sluice.wire.prompt_logprobs import PromptLogprobs
from sluice.wire.requests import Submit
from sluice.wire.rows import Open, TokenRow
from sluice.wire.stats import RequestProgress, StepStats
from sluice.wire.tensors import TensorRows


class Stop(NamedTuple):
    """A command to end a request, or one of its sequences, with ABORTED."""

    request: int
    attempt: int
    sequence: int | None = None
    """None: all sequences of the request."""


class Responses(msgspec.Struct, frozen=True):
    """The output of a step. The receiver owns the lists. A row with an end is the last one of its sequence."""

    opened: list[Open] = []
    """Requests that were scheduled for the first time, or ended before that. An Open precedes all rows of its request.
    """
    prompt_logprobs: list[PromptLogprobs] = []
    """The parts of a prompt precede the first row with tokens of their request."""
    tensors: list[TensorRows] = []
    """In order for each request, and without gaps for each tensor."""
    rows: list[TokenRow] = []
    refused: list[tuple[Submit, Fault]] = []
    """Requests that have no rows. If such a request has the number of a live one, the live one is unaffected."""

    def __bool__(self) -> bool:
        return bool(self.rows or self.opened or self.refused or self.prompt_logprobs or self.tensors)


class Report(NamedTuple):
    step: StepStats | None
    """None if nothing was computed."""
    requests: list[RequestProgress]
    """Requests that arrived, were first scheduled or ended, each once; running ones are refreshed periodically."""

    def __bool__(self) -> bool:
        return self.step is not None or bool(self.requests)


@dataclass(frozen=True, slots=True)
class Hooks:
    get_requests: Callable[[int], Iterable[Submit]]
    """Returns new requests, oldest first, at most the given number."""
    send_responses: Callable[[Responses], None]
    """Called only with responses that are not empty."""
    poll_stop_ids: Callable[[], Iterable[Stop]]
    """Called after get_requests, so a request and its stop may arrive together."""
    report_stats: Callable[[Report], None]
    """Called after each step that computed something, and when a request changed without a step."""
    tensor_room: Callable[[Submit], int] = lambda _: NO_LIMIT
    """Returns the bytes of tensors that the request may send now; at 0 its sequences wait."""
