"""The call of one request to the server, and the statistics that its result waits for."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from sluice.client import AdapterMissing, AdapterNotFound, AsyncClient, Chunk, Generation, Overloaded, SluiceError
from sluice.executor.adapters import Adapters, Loading, UsedAdapter
from sluice.executor.chunk_queue import ChunkQueue, Ending
from sluice.executor.request import GenerationRequest
from sluice.v1 import admin_pb2 as pb

T = TypeVar("T")

RETRY_SECONDS = 1.0
"""Delay before a retry, if an overloaded server suggests none."""
LOAD_TRIES = 2
"""Maximum number of times that a request loads its adapters. They are loaded again if the server has dropped them, for
example because all its services restarted."""
REPORT_SECONDS = 5.0
"""Longest wait for statistics, in case the engine has died: ten times the interval at which engines report."""


def has_token(stats: pb.RequestStats) -> bool:
    """Whether the request has generated a token."""
    return stats.HasField("first_token")


def has_ended(stats: pb.RequestStats) -> bool:
    return bool(stats.stage == pb.REQUEST_STAGE_ENDED)


class StatsWatch:
    """The newest statistics of one request. Used on the session's event loop."""

    def __init__(self) -> None:
        self._latest: pb.RequestStats | None = None
        self._changed = asyncio.Event()

    def put(self, stats: pb.RequestStats) -> None:
        self._latest = stats
        self._changed.set()

    async def wait(self, reached: Callable[[pb.RequestStats], bool]) -> pb.RequestStats | None:
        """Wait until the statistics satisfy `reached`, or for REPORT_SECONDS, and return the newest, if any."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                while self._latest is None or not reached(self._latest):
                    self._changed.clear()
                    await self._changed.wait()
        return self._latest


class _OutOfTimeError(Exception):
    """The time allotted to the request expired before it was sent."""


class PendingCall:
    """The call of one submitted request. Runs on the session's event loop.

    `patient`: retry while the server is overloaded. `on_end` is called after the ending has been queued.
    """

    def __init__(
        self,
        wire_id: str,
        request: GenerationRequest,
        queue: ChunkQueue,
        patient: bool,
        on_end: Callable[[], None] | None,
    ) -> None:
        self.wire_id = wire_id
        self.sent = False
        """Whether the server may know the request."""
        self.answered = False
        """Whether the response is complete; only its statistics may be missing."""
        self.is_aborted = False
        """Whether the caller aborted or cancelled the request."""
        self.begun = False
        """Whether a part of the response has been received."""
        self._is_loading = False
        """Whether the request's adapters are being loaded, or failed to load."""
        self.stats = StatsWatch() if request.return_perf_metrics else None
        """The request's statistics; None if not requested."""
        self.task: asyncio.Task[None]
        self._request = request
        self._submitted_at = time.monotonic()
        self._queue = queue
        self._patient = patient
        self._on_end = on_end

    async def run(self, client: AsyncClient, adapters: Adapters, in_flight: asyncio.Semaphore) -> None:
        """Wait for a permit of `in_flight`, send the request, and queue its response.

        Raises SluiceError, TypeError, ValueError, OSError.
        """
        try:
            await self._in_time(in_flight.acquire)
            try:
                await self._send(client, adapters)
            finally:
                in_flight.release()
        except _OutOfTimeError:
            self._queue.end(Ending(unfinished="timeout"))

    def end(self, error: BaseException | None) -> None:
        """Queue the ending of a call that failed with `error`, if it did, and call `on_end`."""
        if isinstance(error, Exception):
            refused = self._is_loading and not (isinstance(error, SluiceError) and error.retryable)
            failed = Ending(error=error, refused_adapter=refused)
            self._queue.end(Ending(unfinished="cancelled") if self.is_aborted else failed)
        if self._on_end is not None:
            self._on_end()

    async def _send(self, client: AsyncClient, adapters: Adapters) -> None:
        clamped = await self._clamp_retention(client)
        with adapters.use(clamped) as used:
            tries_left = LOAD_TRIES
            while True:
                loadings: list[Loading] = []
                try:
                    self._is_loading = True
                    loadings = await self._in_time(partial(_load, used))
                    self._is_loading = False
                    await self._generate(client, self._with_time_left(clamped))
                    return
                except Overloaded as error:
                    if not self._patient:
                        raise
                    delay = error.retry_after or RETRY_SECONDS
                except (AdapterNotFound, AdapterMissing):
                    tries_left -= 1
                    if not loadings or self.begun or not tries_left:
                        raise
                    for adapter, loading in zip(used, loadings, strict=True):
                        adapter.mark_missing(loading)
                    delay = 0.0
                self.sent = False
                await self._in_time(partial(asyncio.sleep, delay))

    async def _generate(self, client: AsyncClient, request: GenerationRequest) -> None:
        self.sent = True
        await (self._stream(client, request) if request.streaming else self._whole(client, request))

    async def _clamp_retention(self, client: AsyncClient) -> GenerationRequest:
        """Clip the retention ranges to the prompt, so that one configuration fits prompts of any length."""
        request, inputs = self._request, self._request.inputs
        retention = request.kv_cache_retention_config
        if retention is None or not retention.is_bounded:
            return request
        if isinstance(inputs, str):
            special = request.sampling_params.add_special_tokens
            tokenization = await client.tokenize(inputs, model=request.model or "", add_special_tokens=special)
            return replace(request, kv_cache_retention_config=retention.within(len(tokenization.token_ids)))
        if isinstance(inputs, Sequence) and inputs and isinstance(inputs[0], int):
            return replace(request, kv_cache_retention_config=retention.within(len(inputs)))
        # A chat, whose length only the server knows, or embeddings: the server checks the ranges.
        return request

    def _with_time_left(self, request: GenerationRequest) -> GenerationRequest:
        left = self._seconds_left()
        return request if left is None else replace(request, allotted_time_ms=1000 * left)

    async def _in_time(self, wait: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._seconds_left()):
                return await wait()
        except TimeoutError:
            raise _OutOfTimeError from None

    def _seconds_left(self) -> float | None:
        """Seconds left of the allotted time; None: no limit. Raises _OutOfTimeError."""
        allotted = self._request.allotted_seconds
        # The server rejects an invalid limit with an explanation.
        if allotted is None or allotted <= 0:
            return None
        left = allotted - (time.monotonic() - self._submitted_at)
        if left <= 0:
            raise _OutOfTimeError
        return left

    async def _whole(self, client: AsyncClient, request: GenerationRequest) -> None:
        generation = await client.generate(request.inputs, **request.client_options(self.wire_id))
        self.answered = True
        await self._put_stats(has_ended)
        self._queue.end(Ending(generation.usage, generation.timings, generation.prompt_logprobs), _chunks(generation))

    async def _stream(self, client: AsyncClient, request: GenerationRequest) -> None:
        last: Chunk | None = None
        stream = client.stream(request.inputs, **request.client_options(self.wire_id))
        began = False
        async for chunk in stream:
            self.begun = True
            if not began and chunk.token_ids:
                began = True
                await self._put_stats(has_token)
            # Hold back each output's end: the last one must be read together with the end of the request.
            if last is not None:
                self._queue.put(last)
            last = chunk if chunk.finish_reason is not None else None
            if last is None:
                self._queue.put(chunk)
        self.answered = True
        await self._put_stats(has_ended)
        self._queue.end(Ending(stream.usage, stream.timings, stream.prompt_logprobs), () if last is None else (last,))

    async def _put_stats(self, reached: Callable[[pb.RequestStats], bool]) -> None:
        if self.stats is not None and (stats := await self.stats.wait(reached)) is not None:
            self._queue.put_stats(stats)


async def _load(adapters: list[UsedAdapter]) -> list[Loading]:
    return [await adapter.load() for adapter in adapters]


def _chunks(generation: Generation) -> list[Chunk]:
    tensors = [Chunk(index=tensor.index, tensor=tensor) for tensor in generation.tensors]
    outputs = [
        Chunk(
            index=output.index,
            text=output.text,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            token_count=len(output.token_ids),
            finish_reason=output.finish_reason,
            stop_string=output.stop_string,
            stop_token_id=output.stop_token_id,
            completion_tokens=len(output.token_ids),
            cumulative_logprob=output.cumulative_logprob,
        )
        for output in generation.outputs
    ]
    return [*tensors, *outputs]
