"""A client on the simulated ring, with two routers and the client library's own StreamState and Retries."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

from router.access.principal import Principal
from router.errors import RequestError
from sluice.client.errors import (
    AlreadyExists,
    InvalidRequest,
    LostEvents,
    ModelChanged,
    Overloaded,
    SluiceError,
    Unavailable,
)
from sluice.client.results import Chunk
from sluice.client.retries import Retries, is_router_failure
from sluice.client.stream_state import StreamState
from sluice.v1 import generation_pb2 as pb

KINDS = {
    "UNAVAILABLE": Unavailable,
    "RESOURCE_EXHAUSTED": Overloaded,
    "ALREADY_EXISTS": AlreadyExists,
    "INVALID_ARGUMENT": InvalidRequest,
    "FAILED_PRECONDITION": ModelChanged,
}


@dataclass(frozen=True)
class ClientPlan:
    """A request, and how its client behaves."""

    at: float
    """Seconds from the start of the simulation."""
    spec: pb.GenerationSpec
    slow: float = 0.0
    """Probability of a long pause after an event."""
    disconnects_after: float | None = None
    """Seconds from the start of the request."""
    aborts_after: float | None = None
    """Seconds from the start of the request until the client asks every router to abort it."""

    @property
    def may_end_early(self) -> bool:
        limited = self.spec.HasField("time_limit")
        return self.disconnects_after is not None or self.aborts_after is not None or limited

    @property
    def to_natural_end(self) -> "ClientPlan":
        """The same request, whose client waits for its natural end."""
        spec = pb.GenerationSpec()
        spec.CopyFrom(self.spec)
        spec.ClearField("time_limit")
        return replace(self, spec=spec, disconnects_after=None, aborts_after=None)


@dataclass
class Transcript:
    """The text, tokens and ends that a client received, by output."""

    prompt: list[int] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[tuple[int, float | None]]] = field(default_factory=dict)
    tensors: dict[tuple[int, str, bool], list[int]] = field(default_factory=dict)
    """Rows of one number each, by output, tensor name, and whether they are the prompt's."""
    ends: dict[int, list[str]] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    """Prompt tokens and completion tokens."""
    violations: list[str] = field(default_factory=list)
    """Violations found in the stream, as sentences."""
    error: str = ""
    """The reason of the error that ended the stream."""
    resumed: int = 0
    """Number of attempts after the first."""
    disconnected: bool = False
    """Whether the client disconnected before the end."""
    model_changed: bool = False
    """Whether the stream ended because its model is no longer served."""


class ConnectionChecks:
    """Checks the events of one connection: a router may not repeat or skip any, end an output twice, or continue it.

    The client library would tolerate some of this.
    """

    def __init__(self, spec: pb.GenerationSpec, violations: list[str]) -> None:
        self._tokens = {output.index: len(output.token_ids) for output in spec.resume}
        """Number of tokens so far, by output."""
        self._rows: dict[tuple[int, str, bool], int] = {}
        """Number of rows so far, by output, tensor name, and whether they are the prompt's."""
        self._resumed_rows = {output.index: output.tensor_rows for output in spec.resume}
        self._context_rows = spec.resume_context_rows
        self._ended: set[int] = set()
        self._events = 0
        self._done = False
        self._violations = violations

    def check(self, event: pb.GenerateStreamResponse) -> None:
        self._events += 1
        kind = event.WhichOneof("event")
        if self._done or event.sequence != self._events or (kind == "started") != (self._events == 1):
            self._violations.append(f"event {event.sequence} is {kind}, after {self._events - 1} others")
        self._done = self._done or kind == "done"
        if kind == "tensor":
            self._check_tensor(event.tensor)
        elif kind == "delta":
            self._check_delta(event.delta)
        elif kind == "finished":
            self._check_finished(event.finished)

    def _check_delta(self, delta: pb.Delta) -> None:
        index, received = delta.index, self._tokens.get(delta.index, 0)
        if index in self._ended:
            self._violations.append(f"output {index} has a delta after its end")
        if delta.token_offset != received:
            self._violations.append(f"output {index} has a delta at {delta.token_offset} after {received} tokens")
        self._tokens[index] = received + delta.token_count

    def _check_finished(self, finished: pb.Finished) -> None:
        index, received = finished.index, self._tokens.get(finished.index, 0)
        if index in self._ended:
            self._violations.append(f"output {index} ends twice")
        self._ended.add(index)
        if finished.completion_tokens != received:
            self._violations.append(f"output {index} ends after {finished.completion_tokens} tokens, not {received}")

    def _check_tensor(self, chunk: pb.TensorChunk) -> None:
        first = self._context_rows if chunk.context else self._resumed_rows.get(chunk.index, 0)
        key = chunk.index, chunk.name, chunk.context
        received = self._rows.get(key, first)
        if chunk.start != received:
            self._violations.append(f"rows of {key} start at {chunk.start} after {received} rows")
        self._rows[key] = chunk.start + chunk.shape[0]
        if not chunk.context and self._rows[key] > self._tokens.get(chunk.index, 0):
            self._violations.append(f"rows of {key} up to {self._rows[key]} arrived before their tokens")
        if chunk.index in self._ended:
            self._violations.append(f"rows of {key} arrived after the end")


class SimClient:
    """Sends one request, and resumes it until it is complete."""

    def __init__(self, plan: ClientPlan, random: Random, routers: Callable[[], list[Any]]) -> None:
        """`routers` returns the two routers; None in place of one that cannot be called at the moment."""
        self.transcript = Transcript(list(plan.spec.token_ids.ids))
        self.ended = False
        self._plan = plan
        self._spec = pb.GenerationSpec()
        self._spec.CopyFrom(plan.spec)
        self._random = random
        self._routers = routers
        self._current = random.randrange(2)

    async def run(self) -> None:
        await asyncio.sleep(self._plan.at)
        aborting = asyncio.ensure_future(self._abort())
        try:
            async with asyncio.timeout(self._plan.disconnects_after):
                await self._read()
        except TimeoutError:
            self.transcript.disconnected = True
        finally:
            self.ended = True
            aborting.cancel()

    async def _abort(self) -> None:
        if self._plan.aborts_after is not None:
            await asyncio.sleep(self._plan.aborts_after)
            for router in filter(None, self._routers()):
                operator = SimpleNamespace(caller=Principal())
                await router.generation.abort(pb.AbortRequest(request_id=self._spec.request_id), operator)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        attempts = Retries(2, None, 120.0, 120.0, loop.time())
        resume = StreamState(self._spec, attempts)
        while not resume.complete:
            try:
                await self._attempt(resume, loop.time())
                raise LostEvents("the stream ended without its last event")
            except SluiceError as error:
                if resume.complete or (isinstance(error, Unavailable) and resume.end_early()):
                    break
                if is_router_failure(error):
                    self._current = 1 - self._current
                try:
                    await asyncio.sleep(attempts.on_failure(error, loop.time()))
                except ModelChanged:
                    self.transcript.model_changed = True
                    return
                except SluiceError as final:
                    self.transcript.error = final.reason
                    self.transcript.violations.append(f"{type(final).__name__} {final.reason}: {final}")
                    return
        self.transcript.resumed = resume.resumed
        usage = resume.usage
        self.transcript.usage = (usage.prompt_tokens, usage.completion_tokens)

    async def _attempt(self, resume: StreamState, now: float) -> None:
        router = self._routers()[self._current]
        if router is None:
            raise Unavailable("the router does not run")
        lost: list[SluiceError] = []
        spec = resume.request(now).spec
        checks = ConnectionChecks(spec, self.transcript.violations)

        async def write(event: pb.GenerateStreamResponse) -> None:
            await asyncio.sleep(0.0005)
            if self._random.random() < self._plan.slow:
                await asyncio.sleep(self._random.uniform(0.5, 4.0))
            checks.check(event)
            try:
                for chunk in resume.on_event(event):
                    self._record(chunk)
            except SluiceError as error:
                lost.append(error)
                raise asyncio.CancelledError from None

        request = pb.GenerateStreamRequest()
        request.spec.CopyFrom(spec)
        try:
            await router.stream(request, write)
        except RequestError as error:
            kind = KINDS.get(error.code.status, SluiceError)
            deaths = int(error.metadata.get("engine_deaths", 0))
            raise kind(
                error.message, reason=error.code.name, retry_after=error.code.retry_after, engine_deaths=deaths
            ) from None
        except asyncio.CancelledError:
            if lost:
                raise lost[0] from None
            if router.alive or asyncio.current_task().cancelling():
                raise
            raise Unavailable("the connection broke") from None

    def _record(self, chunk: Chunk) -> None:
        transcript = self.transcript
        if chunk.tensor is not None:
            tensor = chunk.tensor
            rows = transcript.tensors.setdefault((tensor.index, tensor.name, tensor.context), [])
            if tensor.start != len(rows):
                transcript.violations.append(f"rows start at {tensor.start} after {len(rows)} rows")
            rows += tensor.array().reshape(-1).tolist()
            return
        tokens = transcript.tokens.setdefault(chunk.index, [])
        if chunk.index in transcript.ends:
            transcript.violations.append(f"output {chunk.index} continues after its end")
        if chunk.finish_reason is not None:
            transcript.ends.setdefault(chunk.index, []).append(
                f"{chunk.finish_reason} {chunk.stop_string or chunk.stop_token_id or ''}"
            )
            return
        if chunk.token_offset != len(tokens) or chunk.token_count != len(chunk.token_ids):
            transcript.violations.append(
                f"output {chunk.index}: {chunk.token_count} tokens at {chunk.token_offset} after {len(tokens)}"
            )
        tokens.extend(chunk.token_ids)
        logprobs = transcript.logprobs.setdefault(chunk.index, [])
        logprobs.extend((logprob.token_id, logprob.logprob) for logprob in chunk.logprobs)
        transcript.text[chunk.index] = transcript.text.get(chunk.index, "") + chunk.text
