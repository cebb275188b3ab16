"""The streams of both clients: iterators of chunks that remember what the stream told about the request."""

import asyncio
from types import TracebackType
from typing import Any, Self

import grpc

from sluice.client.errors import ServerError, from_call_error, from_rpc_error, is_task_cancelled
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


class Stream(StreamInfo):
    """Iterator of `Chunk`. Closing, leaving its `with` block or dropping it cancels the request."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call
        self._closed = False

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
            if self._closed:
                raise StopIteration from None
            raise from_rpc_error(error) from None
        return event

    def close(self) -> None:
        """End the stream here, from any thread; a request that still runs is cancelled."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._call.cancel()


class AsyncStream(StreamInfo):
    """Asynchronous iterator of `Chunk`. Closing, leaving its `async with` block or dropping it cancels the request."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call
        self._incoming = aiter(call)
        self._closed = False

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
            if self._closed:
                raise StopAsyncIteration from None
            raise from_call_error(error) from None
        return event

    def close(self) -> None:
        """End the stream here; a request that still runs is cancelled."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._call.done():
            self._call.cancel()
