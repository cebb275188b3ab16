"""The interface between the engine's core and its driver: four callables, named after TensorRT-LLM's batch manager.

The core calls them from the thread that calls `Engine.step`; none may block. Arguments and results are plain data.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from sluice.ring.errors import Fault
from sluice.ring.prompt_logprobs import PromptLogprobs
from sluice.ring.rows import Open, TokenRow
from sluice.ring.stats import RequestStats, StepStats
from sluice.ring.tensors import TensorRows
from sluice.ring.wire import Submit

UNLIMITED = 1 << 62


class Stop(NamedTuple):
    """Asks to end a request, or one of its sequences, with ABORTED."""

    request: int
    attempt: int
    sequence: int | None = None


class Responses(msgspec.Struct, frozen=True):
    """What a step produced. The receiver owns the lists. A row with an end is the last of its sequence."""

    opened: list[Open] = []
    """Requests that were first scheduled, or ended before that. Precede their first row."""
    prompt_logprobs: list[PromptLogprobs] = []
    """All of a prompt precede the first row of their request with tokens."""
    tensors: list[TensorRows] = []
    """In order, for each request, and for each of its tensors without a gap."""
    rows: list[TokenRow] = []
    refused: list[tuple[Submit, Fault]] = []
    """Requests that get no rows. If the number of one is in use, the live request is unaffected."""

    def __bool__(self) -> bool:
        return bool(self.rows or self.opened or self.refused or self.prompt_logprobs or self.tensors)


class Report(NamedTuple):
    step: StepStats | None
    """None if nothing was computed."""
    requests: list[RequestStats]
    """Requests that arrived, began or ended, each once; running ones are refreshed now and then."""

    def __bool__(self) -> bool:
        return self.step is not None or bool(self.requests)


@dataclass(frozen=True, slots=True)
class Hooks:
    get_requests: Callable[[int], Iterable[Submit]]
    """Returns new requests, oldest first, at most the given number."""
    send_responses: Callable[[Responses], None]
    """Called only if there are any."""
    poll_stop_ids: Callable[[], Iterable[Stop]]
    """Called after get_requests, so a request and its stop may arrive together."""
    report_stats: Callable[[Report], None]
    """Called after each step that computed something, and when a request changed without one."""
    tensor_room: Callable[[Submit], int] = lambda _: UNLIMITED
    """Bytes of tensors that this request may bring now; at 0 it waits."""
