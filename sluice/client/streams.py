"""The streams of both clients: iterators of chunks that remember what the stream told about the request."""

import asyncio
from typing import Any, Self

import grpc

from sluice.client.calls import AsyncOpenCall, OpenCall
from sluice.client.errors import ServerError, is_task_cancelled
from sluice.client.results import (
    Chunk,
    Timings,
    TokenLogprob,
    Usage,
    read_delta,
    read_finished,
    read_logprobs,
    read_tensor,
    read_timings,
    read_usage,
)
from sluice.v1 import generation_pb2 as pb


class StreamInfo:
    """What a stream has told so far, beside its chunks."""

    def __init__(self) -> None:
        self.request_id = ""
        """For `abort`; known with the first chunk, as all up to `prompt_logprobs`."""
        self.seed: int | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.usage: Usage | None = None
        """Known when the stream has ended well."""
        self.timings: Timings | None = None
        """The same, if asked for."""
        self._events = 0

    def _take(self, event: pb.GenerateStreamResponse) -> Chunk | None:
        """The event's chunk, if it is one. Unknown events are ignored; raises ServerError where events are missing."""
        self._events += 1
        if event.sequence != self._events:
            raise ServerError(f"the stream lost events: expected number {self._events}, got {event.sequence}")
        match event.WhichOneof("event"):
            case "delta":
                return read_delta(event.delta)
            case "finished":
                return read_finished(event.finished)
            case "tensor":
                return Chunk(index=event.tensor.index, tensor=read_tensor(event.tensor))
            case "started":
                self._start(event.started)
            case "done":
                self.usage = read_usage(event.done.usage)
                self.timings = read_timings(event.done.timings) if event.done.HasField("timings") else None
        return None

    def _start(self, started: pb.Started) -> None:
        self.request_id = started.request_id
        self.seed = started.seed
        self.prompt_tokens = started.prompt_tokens
        self.cached_tokens = started.cached_tokens
        self.prompt_logprobs = read_logprobs(started.prompt_logprobs)

    def _check_end(self) -> None:
        if self.usage is None:
            raise ServerError("the stream ended without its last event")


class Stream(StreamInfo, OpenCall):
    """Iterator of `Chunk`. Closing, leaving its `with` block or dropping it cancels the request."""

    def __init__(self, call: Any) -> None:
        StreamInfo.__init__(self)
        OpenCall.__init__(self, call)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            while True:
                chunk = self._take(self._receive())
                if chunk is not None:
                    return chunk
        except BaseException:
            self.close()
            raise

    def _receive(self) -> pb.GenerateStreamResponse:
        if self._closed:
            raise StopIteration
        try:
            event: pb.GenerateStreamResponse = next(self._call)
        except StopIteration:
            self._check_end()
            raise
        except grpc.RpcError as error:
            raise self._ended(error) from None
        return event


class AsyncStream(StreamInfo, AsyncOpenCall):
    """Asynchronous iterator of `Chunk`. Closing, leaving its `async with` block or dropping it cancels the request."""

    def __init__(self, call: Any) -> None:
        StreamInfo.__init__(self)
        AsyncOpenCall.__init__(self, call)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            while True:
                chunk = self._take(await self._receive())
                if chunk is not None:
                    return chunk
        except BaseException:
            self.close()
            raise

    async def _receive(self) -> pb.GenerateStreamResponse:
        if self._closed:
            raise StopAsyncIteration
        try:
            event: pb.GenerateStreamResponse = await anext(self._incoming)
        except StopAsyncIteration:
            self._check_end()
            raise
        except (grpc.RpcError, asyncio.CancelledError) as error:
            if is_task_cancelled():
                raise
            raise self._ended(error) from None
        return event
