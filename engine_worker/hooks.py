"""The interface between the engine's core and its driver: four callables, named after TensorRT-LLM's batch manager.

The core calls them from the thread that calls `Engine.step`; none may block. Arguments and results are plain data.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sluice.ring.errors import Fault
from sluice.ring.stats import RequestStats, StepStats
from sluice.ring.wire import Submit, TokenRow


class Stop(NamedTuple):
    """Asks to end a request, or one of its sequences, with ABORTED."""

    request: int
    attempt: int
    sequence: int | None = None


class Opened(NamedTuple):
    """A request was scheduled for the first time, or ended before that. Precedes its first row."""

    spec: Submit
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    queue: float
    """Seconds in the queue."""


class Refused(NamedTuple):
    """A request that was not accepted and gets no rows. If its number is in use, the live request is unaffected."""

    spec: Submit
    fault: Fault


@dataclass(frozen=True, slots=True)
class Responses:
    """What a step produced. The receiver owns the lists. A row with an end is the last of its sequence."""

    opened: list[Opened] = field(default_factory=list)
    rows: list[TokenRow] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.opened or self.rows or self.refused)


class Report(NamedTuple):
    """Statistics of a step and of requests."""

    step: StepStats | None
    """None if nothing was computed."""
    requests: list[RequestStats]
    """Requests that arrived, began or ended, each once; running ones are refreshed now and then."""

    def __bool__(self) -> bool:
        return self.step is not None or bool(self.requests)


@dataclass(frozen=True, slots=True)
class Hooks:
    """The four callables."""

    get_requests: Callable[[int], Iterable[Submit]]
    """Returns new requests, oldest first, at most the given number."""
    send_responses: Callable[[Responses], None]
    """Called only if there are any."""
    poll_stop_ids: Callable[[], Iterable[Stop]]
    """Called after get_requests, so a request and its stop may arrive together."""
    report_stats: Callable[[Report], None]
    """Called after each step that computed something, and when a request changed without one."""
