"""The streams of both clients: iterators of chunks that remember what the stream told about the request.

Both resume themselves on the next router where one fails: `Resume` knows how, these do the calls and the waiting.
"""

import asyncio
import time
from collections import deque
from contextlib import suppress
from typing import Any, Self

import grpc

from sluice.client.calls import AsyncOpenCall, OpenCall
from sluice.client.errors import (
    LostEvents,
    SluiceError,
    Unavailable,
    from_call_error,
    from_rpc_error,
    is_task_cancelled,
)
from sluice.client.results import Chunk, Timings, TokenLogprob, Usage
from sluice.client.resume import Resume
from sluice.client.routers import Routers
from sluice.v1 import generation_pb2 as pb


class StreamInfo:
    """What a stream has told so far, beside its chunks; and its attempts, without their input and output."""

    def __init__(self, spec: pb.GenerationSpec, routers: Routers, timeout: float | None) -> None:
        self._attempts = routers.attempts(timeout)
        self._resume = Resume(spec, self._attempts)
        self._routers = routers
        self._router = routers.current
        self._chunks: deque[Chunk] = deque()

    @property
    def request_id(self) -> str:
        """For `abort`; known with the first chunk, as all up to `prompt_logprobs`."""
        return self._resume.request_id

    @property
    def seed(self) -> int | None:
        """The caller's, or the one drawn for the request."""
        return self._resume.seed

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self._resume.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Of which from the prefix cache."""
        return self._resume.cached_tokens

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """If asked for."""
        return self._resume.prompt_logprobs

    @property
    def usage(self) -> Usage | None:
        """Known when the stream has ended well."""
        return self._resume.usage

    @property
    def timings(self) -> Timings | None:
        """The same, if asked for; those of the last attempt."""
        return self._resume.timings

    @property
    def resumed(self) -> int:
        """How often it broke and went on."""
        return self._resume.resumed

    def _start(self) -> Any:
        """The call of the next attempt."""
        self._router = self._routers.current
        now = time.monotonic()
        timeout, request = self._attempts.left(now), self._resume.request(now)
        return self._routers.start(self._router, lambda router: router.generation.GenerateStream, request, timeout)

    def _failed(self, error: SluiceError) -> float | None:
        """Seconds to wait before the next attempt; None where the stream has ended. Raises what is final."""
        if isinstance(error, Unavailable) and self._resume.ends_here():
            return None
        return self._routers.failed(self._router, error, self._attempts)

    def _ended(self) -> LostEvents:
        return LostEvents("the stream ended without its last event")


class Stream(StreamInfo, OpenCall):
    """Iterator of `Chunk`. Closing, leaving its `with` block or dropping it cancels the request."""

    def __init__(self, spec: pb.GenerationSpec, routers: Routers, timeout: float | None) -> None:
        StreamInfo.__init__(self, spec, routers, timeout)
        OpenCall.__init__(self, self._start())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            while not self._chunks:
                self._receive()
            return self._chunks.popleft()
        except BaseException:
            self.close()
            raise

    def _receive(self) -> None:
        if self._closed.is_set():
            raise StopIteration
        error: SluiceError
        try:
            self._chunks += self._resume.take(next(self._call))
            return
        except StopIteration:
            if self._resume.complete:
                raise
            error = self._ended()
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
        except SluiceError as failure:
            error = failure
        self._recover(error)

    def _recover(self, error: SluiceError) -> None:
        self._call.cancel()
        if self._closed.is_set():
            raise StopIteration
        pause = self._failed(error)
        if pause is None or self._closed.wait(pause):
            raise StopIteration
        self._routers.check_open()
        self._replace(self._start())


class AsyncStream(StreamInfo, AsyncOpenCall):
    """Asynchronous iterator of `Chunk`. Closing, leaving its `async with` block or dropping it cancels the request."""

    def __init__(self, spec: pb.GenerationSpec, routers: Routers, timeout: float | None) -> None:
        StreamInfo.__init__(self, spec, routers, timeout)
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

    async def _receive(self) -> None:
        if self._closed.is_set():
            raise StopAsyncIteration
        error: SluiceError
        try:
            self._chunks += self._resume.take(await anext(self._incoming))
            return
        except StopAsyncIteration:
            if self._resume.complete:
                raise
            error = self._ended()
        except (grpc.RpcError, asyncio.CancelledError) as failure:
            if is_task_cancelled():
                raise
            error = from_call_error(failure)
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
