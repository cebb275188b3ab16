"""How the engine's core meets whoever drives it: four callables, the words of TensorRT-LLM's batch manager.

The core calls them from the thread that calls `Engine.step`, and none of them may wait. What goes through them is plain
data.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sluice.ring.errors import Fault
from sluice.ring.stats import RequestStats, StepStats
from sluice.ring.wire import Submit, TokenRow


class Stop(NamedTuple):
    """A request, or one sequence of it, that shall end with ABORTED."""

    request: int
    attempt: int
    sequence: int | None = None


class Opened(NamedTuple):
    """A request's first step is scheduled, or it ends before that; comes before its first row."""

    spec: Submit
    cached_tokens: int
    """Of its prompt, found in the cache."""
    queue: float
    """Seconds that it waited."""


class Refused(NamedTuple):
    """A request that was not taken in. It gets no rows; where its number is in use, that request goes on."""

    spec: Submit
    fault: Fault


@dataclass(frozen=True, slots=True)
class Responses:
    """What a step brought. Lists belong to the receiver. A row with an end is the last of its sequence."""

    opened: list[Opened] = field(default_factory=list)
    rows: list[TokenRow] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.opened or self.rows or self.refused)


class Report(NamedTuple):
    """Statistics."""

    step: StepStats | None
    """None where nothing was computed."""
    requests: list[RequestStats]
    """Requests that arrived, began or ended, each once; and now and then those that run on."""

    def __bool__(self) -> bool:
        return self.step is not None or bool(self.requests)


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the core asks for and what it tells."""

    get_requests: Callable[[int], Iterable[Submit]]
    """At most so many new requests, oldest first."""
    send_responses: Callable[[Responses], None]
    """Called where there are any."""
    poll_stop_ids: Callable[[], Iterable[Stop]]
    """What is to end. Asked after the requests, so a request and its stop may come in the same breath."""
    report_stats: Callable[[Report], None]
    """Called after each step that computed something, and where a request changed without one."""
