"""The streams of both clients, which resume at the next router. `StreamState` decides how; streams call and wait."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import grpc

from sluice.client.connection import Metadata, Routers
from sluice.client.errors import Cancelled, LostEvents, SluiceError, Unavailable, is_task_cancelled
from sluice.client.results import (
    Chunk,
    FinishReason,
    Generation,
    Output,
    Tensor,
    Timings,
    TokenLogprob,
    Usage,
)
from sluice.client.stream_state import StreamState
from sluice.v1 import generation_pb2 as pb


class OpenCall:
    """Base of the blocking streams. Cancels the call when the stream is closed or deleted."""

    # An attribute of the class, so that `__del__` works after a constructor that raised.
    _call: Any = None

    def __init__(self, call: Any) -> None:
        self._call = call
        self._closed = threading.Event()

    def close(self) -> None:
        """End the stream and cancel its call. Thread-safe."""
        self._closed.set()
        self._call.cancel()

    def cancel(self) -> None:
        """The same as `close`, under gRPC's name."""
        self.close()

    def _replace(self, call: Any) -> None:
        self._call = call
        # `close` in another thread may have cancelled only the previous call.
        if self._closed.is_set():
            call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._call is not None:
            self._call.cancel()


class AsyncOpenCall:
    """Base of the asynchronous streams. Cancels the call when the stream is closed or deleted."""

    _call: Any = None

    def __init__(self, call: Any) -> None:
        self._closed = asyncio.Event()
        self._replace(call)

    def close(self) -> None:
        """End the stream and cancel its call."""
        self._closed.set()
        self._call.cancel()

    def cancel(self) -> None:
        """The same as `close`, under gRPC's name."""
        self.close()

    def _replace(self, call: Any) -> None:
        self._call = call
        self._incoming = aiter(call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._call is not None and not self._call.done():
            self._call.cancel()


class StreamInfo:
    """Base of both streams: the properties of the request, and how its attempts start and fail."""

    def __init__(
        self, spec: pb.GenerationSpec, routers: Routers, timeout: float | None, metadata: Metadata = ()
    ) -> None:
        self._metadata = metadata
        self._retries = routers.begin(timeout)
        self._state = StreamState(spec, self._retries)
        self._routers = routers
        self._router = routers.current
        self._chunks: deque[Chunk] = deque()

    @property
    def request_id(self) -> str:
        """Id of the request, for `abort`. Known from the first chunk on, and empty before."""
        return self._state.request_id

    @property
    def seed(self) -> int | None:
        """Seed of the request, or the one that the server chose. Known from the first chunk on."""
        return self._state.seed

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens. Known from the first chunk on."""
        return self._state.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache. Known from the first chunk on."""
        return self._state.cached_tokens

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """One entry per prompt token, if requested. Known from the first chunk on."""
        return self._state.prompt_logprobs

    @property
    def prompt_tail(self) -> str:
        """The end of the prompt, if requested. Known from the first chunk on."""
        return self._state.prompt_tail

    @property
    def usage(self) -> Usage | None:
        """Token counts; None until the stream has ended without an error."""
        return self._state.usage

    @property
    def timings(self) -> Timings | None:
        """Timings of the last attempt, if requested; None until the stream has ended."""
        return self._state.timings

    @property
    def resumed(self) -> int:
        """Number of times that the stream was resumed."""
        return self._state.resumed

    def _start(self) -> Any:
        self._router = self._routers.current
        now = time.monotonic()
        timeout, request = self._retries.time_left(now), self._state.request(now)
        return self._routers.start(
            self._router, lambda router: router.generation.GenerateStream, request, timeout, self._metadata
        )

    def _failed(self, error: SluiceError) -> float | None:
        """The seconds to wait before the next attempt; None if the stream has ended. Raises `error` if it is final."""
        # If all text was received before the router failed, another attempt would have nothing to generate.
        if isinstance(error, Unavailable) and self._state.end_early():
            return None
        return self._routers.on_failure(self._router, error, self._retries)

    def _cut_short(self) -> SluiceError:
        return LostEvents("the stream ended without its last event")


@dataclass(slots=True)
class OutputParts:
    """The parts of one output."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Chunk | None = None

    def add(self, chunk: Chunk) -> None:
        self.texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        if chunk.finish_reason is not None:
            self.end = chunk

    def output(self, index: int, seed: int | None) -> Output:
        end = self.end or Chunk(index)
        return Output(
            index=index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=end.finish_reason or FinishReason.UNKNOWN,
            stop_string=end.stop_string,
            stop_token_id=end.stop_token_id,
            # Only the first output has the request's seed; the server derives the seeds of the others.
            seed=None if index else seed,
            cumulative_logprob=end.cumulative_logprob,
        )


class Collected:
    """The chunks of a stream so far."""

    def __init__(self) -> None:
        self._outputs: dict[int, OutputParts] = {}
        self._tensors: list[Tensor] = []

    def add(self, chunk: Chunk) -> None:
        if chunk.tensor is not None:
            self._tensors.append(chunk.tensor)
        else:
            self._outputs.setdefault(chunk.index, OutputParts()).add(chunk)

    def generation(self, stream: StreamInfo) -> Generation:
        """The complete result of a stream that has ended. Raises Cancelled if it was closed before its end."""
        if stream.usage is None:
            raise Cancelled("the stream was closed")
        return Generation(
            request_id=stream.request_id,
            outputs=tuple(parts.output(index, stream.seed) for index, parts in sorted(self._outputs.items())),
            usage=stream.usage,
            timings=stream.timings,
            prompt_logprobs=stream.prompt_logprobs,
            tensors=tuple(_joined(self._tensors)),
            prompt_tail=stream.prompt_tail,
        )


class Stream(StreamInfo, OpenCall):
    """Iterator of `Chunk`. Closing it, leaving its `with` block or deleting it cancels the request."""

    def __init__(
        self, spec: pb.GenerationSpec, routers: Routers, timeout: float | None, metadata: Metadata = ()
    ) -> None:
        StreamInfo.__init__(self, spec, routers, timeout, metadata)
        OpenCall.__init__(self, self._start())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            while not self._chunks:
                self._receive()
            return self._chunks.popleft()
        except BaseException:
            # Also on Ctrl-C and StopIteration: a stream that raised has ended, and its request must not continue.
            self.close()
            raise

    def collect(self) -> Generation:
        """Read the rest of the stream, and return the complete result. Raises SluiceError.

        Unlike `generate`, it continues at another router if its router fails.
        """
        collected = Collected()
        with self:
            for chunk in self:
                collected.add(chunk)
        return collected.generation(self)

    def _receive(self) -> None:
        if self._closed.is_set():
            raise StopIteration
        try:
            self._chunks += self._state.on_event(next(self._call))
            return
        except StopIteration:
            if self._state.complete:
                raise
            error = self._cut_short()
        except grpc.RpcError as failure:
            error = self._router.error(failure)
        except SluiceError as failure:
            error = failure
        self._recover(error)

    def _recover(self, error: SluiceError) -> None:
        self._call.cancel()
        if self._closed.is_set():
            raise StopIteration
        pause = self._failed(error)
        # `close` in another thread ends the wait.
        if pause is None or self._closed.wait(pause):
            raise StopIteration
        self._routers.check_open()
        self._replace(self._start())


class AsyncStream(StreamInfo, AsyncOpenCall):
    """Asynchronous iterator of `Chunk`. Closing it, leaving its `async with` or deleting it cancels the request."""

    def __init__(
        self, spec: pb.GenerationSpec, routers: Routers, timeout: float | None, metadata: Metadata = ()
    ) -> None:
        StreamInfo.__init__(self, spec, routers, timeout, metadata)
        AsyncOpenCall.__init__(self, self._start())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            while not self._chunks:
                await self._receive()
            return self._chunks.popleft()
        except BaseException:
            self.close()
            raise

    async def collect(self) -> Generation:
        """Read the rest of the stream, and return the complete result, like `Stream.collect`. Raises SluiceError."""
        collected = Collected()
        async with self:
            async for chunk in self:
                collected.add(chunk)
        return collected.generation(self)

    async def _receive(self) -> None:
        if self._closed.is_set():
            raise StopAsyncIteration
        try:
            self._chunks += self._state.on_event(await anext(self._incoming))
            return
        except StopAsyncIteration:
            if self._state.complete:
                raise
            error = self._cut_short()
        except (grpc.RpcError, asyncio.CancelledError) as failure:
            if is_task_cancelled():
                raise
            error = self._router.error(failure)
        except SluiceError as failure:
            error = failure
        await self._recover(error)

    async def _recover(self, error: SluiceError) -> None:
        self._call.cancel()
        if self._closed.is_set():
            raise StopAsyncIteration
        pause = self._failed(error)
        if pause is None or await self._is_closed_within(pause):
            raise StopAsyncIteration
        self._routers.check_open()
        self._replace(self._start())

    async def _is_closed_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)
        return self._closed.is_set()


def _joined(parts: Iterable[Tensor]) -> Iterable[Tensor]:
    """Join the consecutive parts of each tensor."""
    parts_of_tensor: dict[tuple[int, str, bool], list[Tensor]] = {}
    for part in parts:
        parts_of_tensor.setdefault((part.index, part.name, part.context), []).append(part)
    for first, *others in parts_of_tensor.values():
        rows = first.shape[0] + sum(part.shape[0] for part in others)
        data = b"".join([first.data, *(part.data for part in others)])
        yield replace(first, shape=(rows, *first.shape[1:]), data=data)
