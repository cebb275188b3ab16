"""Spans of an ended request, built from the times that its state has recorded."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.parse.chat import ChatPrompt
from router.requests.attempt import LostAttempt
from router.requests.request_state import RequestState
from router.requests.trace_context import TraceContext
from sluice.wire.errors import FinishReason

HANDED_OVER = FinishReason.HANDED_OVER.name

Attributes = dict[str, str | int | float | list[str]]


@dataclass(frozen=True, slots=True)
class Span:
    """Times are in seconds since the Unix epoch."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)
    error: str = ""
    """Error code; empty if the span did not fail."""


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    time: float
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class RequestTrace:
    context: TraceContext
    request: Span
    children: tuple[Span, ...] = ()
    events: tuple[Event, ...] = ()
    """Events of the span `request`."""

    @property
    def num_spans(self) -> int:
        return 1 + len(self.children)


def trace_refused(context: TraceContext, arrived: float, model: str, request_id: str, code: str) -> RequestTrace:
    """The trace of a request that was refused before it began. `arrived`: by time.monotonic, like all times of
    requests."""
    shift = _shift()
    attributes: Attributes = {"gen_ai.request.model": model, "sluice.request_id": request_id, "error.type": code}
    return RequestTrace(context, Span("generate", arrived + shift, time.time(), attributes, code))


def trace_ended(request: RequestState, context: TraceContext, model: str, outcome: str, status: str) -> RequestTrace:
    """The trace of a request whose response is ending now."""
    shift, now = _shift(), time.monotonic()
    failed = "" if status == "OK" else outcome
    root = Span(
        f"{_operation(request)} {model}",
        request.arrived + shift,
        now + shift,
        _attributes(request, model, outcome, failed),
        failed,
    )
    phases = (Span(name, start + shift, end + shift) for name, start, end in _phases(request, now))
    attempts = _attempts(request, now, shift) if request.lost_attempts else ()
    events = [_event(lost, shift) for lost in request.lost_attempts]
    return RequestTrace(context, root, (*phases, *attempts), tuple(events))


def _shift() -> float:
    """Offset from time.monotonic to seconds since the Unix epoch."""
    return time.time() - time.monotonic()


def _phases(request: RequestState, now: float) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of each phase, in order and without gaps."""
    bounds = [request.arrived, *_bounds(request)]
    # The times come from different clocks, so make sure that no phase ends before it begins, or after the response.
    for name, start, end in zip(("queue", "prefill", "decode", "detokenize"), bounds, [*bounds[1:], now], strict=False):
        yield name, min(start, now), min(max(start, end), now)


def _bounds(request: RequestState) -> list[float]:
    """End times of the phases that have ended."""
    if request.submitted is None:
        return []
    times = [sequence.end.times for sequence in request.log.sequences if sequence.end is not None]
    if not times:
        # Without an end from the engine, use the times that the router has observed itself.
        return [request.submitted, *([] if request.first_tokens_at is None else [request.first_tokens_at])]
    first = min(times, key=lambda sequence: sequence.queue + sequence.context)
    last = max(sequence.queue + sequence.context + sequence.generation for sequence in times)
    ends = [request.submitted + after for after in (first.queue, first.queue + first.context, last)]
    return ends if request.terminal_at is None else [*ends, request.terminal_at]


def _attempts(request: RequestState, now: float, shift: float) -> Iterator[Span]:
    for lost in request.lost_attempts:
        attributes = _attempt_attributes(lost.number, lost.engine, lost.detokenizer)
        attributes |= {"sluice.received_tokens": lost.received_tokens}
        error = "" if lost.reason == HANDED_OVER else lost.reason
        yield Span("attempt", lost.submitted + shift, lost.ended + shift, attributes, error)
    last = request.attempt
    if last.number > request.lost_attempts[-1].number:
        attributes = _attempt_attributes(last.number, last.engine.name, last.detokenizer.name)
        yield Span("attempt", last.submitted + shift, (request.terminal_at or now) + shift, attributes)


def _event(lost: LostAttempt, shift: float) -> Event:
    if lost.reason == HANDED_OVER:
        return Event("hand_over", lost.ended + shift, {"sluice.attempt": lost.number})
    return Event("recovery", lost.ended + shift, {"sluice.attempt": lost.number, "sluice.reason": lost.reason})


def _attempt_attributes(number: int, engine: str, detokenizer: str) -> Attributes:
    return {"sluice.attempt": number, "sluice.engine": engine, "sluice.detokenizer": detokenizer}


def _operation(request: RequestState) -> str:
    return "chat" if isinstance(request.spec.prompt, ChatPrompt) else "text_completion"


def _attributes(request: RequestState, model: str, outcome: str, failed: str) -> Attributes:
    """Attributes by OpenTelemetry's conventions for generative AI, and Sluice's own as in its log. Never any text."""
    spec, sampling, log = request.spec, request.spec.sampling, request.log
    first_token = request.first_token_seconds
    ends = [sequence.end.reason.name for sequence in log.sequences if sequence.end is not None]
    attributes: Attributes = {
        "gen_ai.operation.name": _operation(request),
        "gen_ai.provider.name": "sluice",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": spec.request_id,
        "gen_ai.request.choice.count": spec.n,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.stream": spec.streaming,
        "gen_ai.usage.input_tokens": len(request.prompt),
        "gen_ai.usage.cache_read.input_tokens": log.started.cached_tokens if log.started else 0,
        "gen_ai.usage.output_tokens": log.received,
        "sluice.outcome": outcome,
        "sluice.attempts": request.attempts,
    }
    if ends:
        attributes["gen_ai.response.finish_reasons"] = [reason.lower() for reason in ends]
    if first_token is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first_token
    optional = {
        "sluice.tenant": request.tenant,
        "sluice.engine": request.engine,
        "sluice.prefill_engine": request.prefill_engine,
        "error.type": failed,
        "sluice.detokenizer": request.detokenizer,
    }
    return attributes | {name: value for name, value in optional.items() if value}
