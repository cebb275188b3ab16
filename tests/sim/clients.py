"""A client on the simulated ring: the library's own StreamState and Retries, over two routers."""

import asyncio
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace

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
class Asked:
    """One request, and how its client behaves."""

    at: float
    spec: pb.GenerationSpec
    slow: float = 0.0
    """Chance of a long pause after an event."""
    leaves: float | None = None
    """Seconds after which the client goes away."""
    aborts: float | None = None
    """Seconds after which it asks every router to abort."""

    @property
    def cut(self) -> bool:
        """It may well end before its time."""
        return self.leaves is not None or self.aborts is not None or self.spec.HasField("time_limit")

    @property
    def whole(self) -> "Asked":
        """The same, to its natural end."""
        spec = pb.GenerationSpec()
        spec.CopyFrom(self.spec)
        spec.ClearField("time_limit")
        return replace(self, spec=spec, leaves=None, aborts=None)


@dataclass
class Story:
    """What a client received, by output."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[tuple[int, float | None]]] = field(default_factory=dict)
    tensors: dict[tuple[int, str, bool], list[int]] = field(default_factory=dict)
    """By output, name, and whether its rows are the prompt's: these have one number each."""
    ends: dict[int, list[str]] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    faults: list[str] = field(default_factory=list)
    error: str = ""
    """Reason of the error that ended it."""
    resumed: int = 0
    left: bool = False
    changed: bool = False
    """Ended, because its model is not served any more."""


class Connection:
    """What no router may do, whatever a client would make of it: repeat, leave out, end twice, go on after an end."""

    def __init__(self, spec: pb.GenerationSpec, faults: list[str]) -> None:
        self._known = {each.index: len(each.token_ids) for each in spec.resume}
        self._rows: dict[tuple[int, str, bool], int] = {}
        self._resumed_rows = {each.index: each.tensor_rows for each in spec.resume}
        self._context_rows = spec.resume_context_rows
        self._ended: set[int] = set()
        self._events = 0
        self._done = False
        self._faults = faults

    def check(self, event: pb.GenerateStreamResponse) -> None:
        """One more event."""
        self._events += 1
        kind = event.WhichOneof("event")
        if self._done or event.sequence != self._events or (kind == "started") != (self._events == 1):
            self._faults.append(f"event {event.sequence} is {kind}, after {self._events - 1} others")
        self._done = self._done or kind == "done"
        if kind == "tensor":
            self._check_tensor(event.tensor)
        found = event.delta if kind == "delta" else event.finished if kind == "finished" else None
        if found is None:
            return
        known = self._known.get(found.index, 0)
        if found.index in self._ended:
            self._faults.append(f"output {found.index} has {kind} after its end")
        if kind == "delta":
            if found.token_offset != known:
                self._faults.append(f"output {found.index} has a delta at {found.token_offset} after {known} tokens")
            self._known[found.index] = known + found.token_count
        else:
            self._ended.add(found.index)
            if found.completion_tokens != known:
                self._faults.append(f"output {found.index} ends after {found.completion_tokens} tokens, {known} came")

    def _check_tensor(self, chunk: pb.TensorChunk) -> None:
        first = self._context_rows if chunk.context else self._resumed_rows.get(chunk.index, 0)
        key = chunk.index, chunk.name, chunk.context
        have = self._rows.get(key, first)
        if chunk.start != have:
            self._faults.append(f"rows of {key} from {chunk.start} after {have}")
        self._rows[key] = chunk.start + chunk.shape[0]
        if not chunk.context and self._rows[key] > self._known.get(chunk.index, 0):
            self._faults.append(f"rows of {key} up to {self._rows[key]} before their tokens")
        if chunk.index in self._ended:
            self._faults.append(f"rows of {key} after the end")


class SimClient:
    """Asks once, and goes on until it has everything."""

    def __init__(self, asked: Asked, random: Random, routers) -> None:
        """`routers` gives those that can be called now, by place."""
        self.story = Story()
        self.ended = False
        self._asked = asked
        self._spec = pb.GenerationSpec()
        self._spec.CopyFrom(asked.spec)
        self._random = random
        self._routers = routers
        self._current = random.randrange(2)

    async def run(self) -> None:
        await asyncio.sleep(self._asked.at)
        aborting = asyncio.ensure_future(self._abort())
        try:
            async with asyncio.timeout(self._asked.leaves):
                await self._read()
        except TimeoutError:
            self.story.left = True
        finally:
            self.ended = True
            aborting.cancel()

    async def _abort(self) -> None:
        if self._asked.aborts is not None:
            await asyncio.sleep(self._asked.aborts)
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
                    self.story.changed = True
                    return
                except SluiceError as final:
                    self.story.error = final.reason
                    self.story.faults.append(f"{type(final).__name__} {final.reason}: {final}")
                    return
        self.story.resumed = resume.resumed
        usage = resume.usage
        self.story.usage = (usage.prompt_tokens, usage.completion_tokens)

    async def _attempt(self, resume: StreamState, now: float) -> None:
        router = self._routers()[self._current]
        if router is None:
            raise Unavailable("nobody listens")
        lost: list[SluiceError] = []
        spec = resume.request(now).spec
        connection = Connection(spec, self.story.faults)

        async def write(event: pb.GenerateStreamResponse) -> None:
            await asyncio.sleep(0.0005)
            if self._random.random() < self._asked.slow:
                await asyncio.sleep(self._random.uniform(0.5, 4.0))
            connection.check(event)
            try:
                for chunk in resume.on_event(event):
                    self._hear(chunk)
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

    def _hear(self, chunk) -> None:
        story = self.story
        if chunk.tensor is not None:
            tensor = chunk.tensor
            rows = story.tensors.setdefault((tensor.index, tensor.name, tensor.context), [])
            if tensor.start != len(rows):
                story.faults.append(f"rows from {tensor.start} after {len(rows)}")
            rows += tensor.array().reshape(-1).tolist()
            return
        tokens = story.tokens.setdefault(chunk.index, [])
        if chunk.index in story.ends:
            story.faults.append(f"output {chunk.index} goes on after its end")
        if chunk.finish_reason is not None:
            story.ends.setdefault(chunk.index, []).append(
                f"{chunk.finish_reason} {chunk.stop_string or chunk.stop_token_id or ''}"
            )
            return
        if chunk.token_offset != len(tokens) or chunk.token_count != len(chunk.token_ids):
            story.faults.append(
                f"output {chunk.index}: {chunk.token_count} tokens at {chunk.token_offset} after {len(tokens)}"
            )
        tokens.extend(chunk.token_ids)
        story.logprobs.setdefault(chunk.index, []).extend((each.token_id, each.logprob) for each in chunk.logprobs)
        story.text[chunk.index] = story.text.get(chunk.index, "") + chunk.text
