"""The session of an executor with its server: every call it makes, on the event loop that all executors share."""

import asyncio
import concurrent.futures
import logging
import threading
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeVar

from sluice.client import (
    AsyncClient,
    AsyncSteps,
    Cancelled,
    ClientOptions,
    Forbidden,
    InvalidRequest,
    NotImplementedByServer,
    SluiceError,
    Unauthenticated,
)
from sluice.executor.adapters import Adapters
from sluice.executor.call import PendingCall
from sluice.executor.errors import SHUT_DOWN
from sluice.executor.forks import Creator
from sluice.executor.report_logs import KVCacheEventLog, StepsLog
from sluice.executor.waiting import Deadline, Timeout
from sluice.v1 import admin_pb2 as pb

T = TypeVar("T")

log = logging.getLogger("sluice.executor")

CONNECT_SECONDS = 30.0
CLOSE_SECONDS = 5.0
ABORT_RETRY_SECONDS = 0.2
ABORT_TRIES = 10
RECONNECT_SECONDS = 1.0
NO_STATISTICS = (NotImplementedByServer, Unauthenticated, Forbidden)
"""Errors that are final: AdminService may be on another port or require another token."""
NO_EVENTS = (*NO_STATISTICS, InvalidRequest)
FULL_SECONDS = 0.1
"""Interval at which a full log of KV cache events is checked for having been read."""


class Session:
    """Sends calls to the server, at most `max_in_flight` at a time. Thread-safe.

    `is_own`: no other client uses the server, because the executor started it. Raises SluiceError if no server answers,
    RuntimeError in a fork of a process that has had a session.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        max_in_flight: int,
        max_iterations: int,
        client_options: ClientOptions,
        *,
        is_own: bool = False,
    ) -> None:
        self.steps = StepsLog(max_iterations)
        self.cache_events = KVCacheEventLog()
        self._follows_cache = False
        self.accepting = True
        # Request ids must be unique at the server, which other executors and clients may use too.
        self._prefix = uuid.uuid4().hex[:12]
        self._calls: dict[str, PendingCall] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._creator, self._loop = _shared_loop()
        self._creator.check()
        self._in_flight = asyncio.Semaphore(max_in_flight)
        self._client = self._wait(_make_client(addresses, client_options))
        self._adapters = Adapters(self._client, uploads=is_own)
        try:
            self._wait(self._connect())
        except BaseException:
            self.close()
            raise

    def wire_id(self, request_id: int) -> str:
        """The id that the server knows a request of this executor by."""
        return f"{self._prefix}-{request_id}"

    def request_id(self, wire_id: str) -> int | None:
        """The request id of a request at the server; None if another client sent it."""
        return request_number(wire_id) if wire_id.rpartition("-")[0] == self._prefix else None

    def submit(self, call: PendingCall) -> None:
        """Start a call, without waiting for it. Raises RuntimeError after `finish` or `close`, and in a fork."""
        self._creator.check()
        with self._lock:
            if not self.accepting:
                raise RuntimeError(SHUT_DOWN)
            self._loop.call_soon_threadsafe(self._start, call)

    def abort(self, request_id: int) -> None:
        """Abort a request at the server, or cancel its call if the server does not know the request. Does not wait."""
        self._call_soon(self._begin_abort, self.wire_id(request_id))

    def cancel(self, request_ids: list[int]) -> None:
        """Cancel the calls of requests. Does not wait."""
        self._call_soon(self._cancel, list(map(self.wire_id, request_ids)))

    def run(self, call: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """Run one call of the client and wait for its result.

        Raises SluiceError; RuntimeError after `close`, and in a fork.
        """
        self._creator.check()
        if self._closed:
            raise RuntimeError(SHUT_DOWN)
        return self._wait(call(self._client))

    def follow_cache(self) -> None:
        """Start filling `cache_events`, without waiting. Idempotent. Raises RuntimeError in a fork."""
        self._creator.check()
        with self._lock:
            if not (self._closed or self._follows_cache):
                self._follows_cache = True
                self._loop.call_soon_threadsafe(lambda: self._run_in_background(self._follow_cache()))

    def finish(self, timeout: Timeout = None) -> bool:
        """Accept no more calls, and wait for the submitted ones to end. Returns False at the timeout."""
        if self._creator.is_elsewhere:
            return True
        with self._lock:
            self.accepting = False
            if self._closed:
                return True
            ended = asyncio.run_coroutine_threadsafe(self._all_ended(), self._loop)
        deadline = Deadline(timeout)
        while not ended.done() and deadline.left != 0:
            concurrent.futures.wait([ended], deadline.slice)
        return ended.done()

    def close(self) -> None:
        """Cancel all calls and close the connection. Idempotent."""
        # The connection belongs to the process that opened it, and the event loop's thread does not exist in a fork.
        if self._creator.is_elsewhere:
            return
        with self._lock:
            first, self._closed = not self._closed, True
            self.accepting = False
        if first:
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
            # Garbage collection may call this in the event loop's thread, which cannot wait for itself.
            if _is_running_here(self._loop):
                return
            try:
                closing.result(CLOSE_SECONDS)
            except TimeoutError:
                log.warning("the connection did not close within %g s", CLOSE_SECONDS)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _call_soon(self, do: Callable[..., None], *arguments: Any) -> None:
        self._creator.check()
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(do, *arguments)

    # All methods below run in the event loop's thread.

    async def _connect(self) -> None:
        await self._client.health(timeout=CONNECT_SECONDS)
        if self.steps.limit:
            steps = self._client.stream_steps()
            # Wait for the stream, or the steps of the first request could be missed.
            await steps.started()
            self._run_in_background(self._follow(steps))

    def _start(self, call: PendingCall) -> None:
        self._calls[call.wire_id] = call
        call.task = self._loop.create_task(call.run(self._client, self._adapters, self._in_flight))
        call.task.add_done_callback(partial(self._on_end, call))

    def _on_end(self, call: PendingCall, task: "asyncio.Task[None]") -> None:
        del self._calls[call.wire_id]
        call.end(Cancelled(SHUT_DOWN) if task.cancelled() else task.exception())

    def _begin_abort(self, wire_id: str) -> None:
        call = self._calls.get(wire_id)
        if call is not None:
            call.is_aborted = True
            self._run_in_background(self._abort(call))

    async def _abort(self, call: PendingCall) -> None:
        with suppress(SluiceError):
            for _ in range(ABORT_TRIES):
                if not call.sent:
                    break
                if call.task.done() or call.answered or await self._client.abort(call.wire_id):
                    return
                # Either the request has not reached the server yet, or its response is in flight.
                await asyncio.wait({call.task}, timeout=ABORT_RETRY_SECONDS)
        call.task.cancel()

    def _cancel(self, wire_ids: list[str]) -> None:
        for call in filter(None, map(self._calls.get, wire_ids)):
            call.is_aborted = True
            call.task.cancel()

    async def _follow(self, steps: AsyncSteps) -> None:
        while True:
            try:
                async for response in steps:
                    self.steps.put(response)
                    self._put_stats(response)
            except NO_STATISTICS as error:
                self.steps.fail(error)
                return
            except SluiceError as error:
                log.info("statistics are unavailable for now: %s", error)
            # Wait after an orderly end too: the router may be draining, with no successor running yet.
            await asyncio.sleep(RECONNECT_SECONDS)
            steps = self._client.stream_steps()

    def _put_stats(self, response: pb.StreamStepsResponse) -> None:
        for stats in response.requests:
            call = self._calls.get(stats.request_id)
            if call is not None and call.stats is not None:
                call.stats.put(stats)

    async def _follow_cache(self) -> None:
        while True:
            try:
                async for response in self._client.stream_cache_events():
                    self.cache_events.put(response)
                    # Events that are not received yet stay in the engines' buffers.
                    while self.cache_events.full:
                        await asyncio.sleep(FULL_SECONDS)
            except NO_EVENTS as error:
                self.cache_events.fail(error)
                return
            except SluiceError as error:
                log.info("KV cache events are unavailable for now: %s", error)
            await asyncio.sleep(RECONNECT_SECONDS)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        # The event loop holds only weak references to its tasks.
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _all_ended(self) -> None:
        if self._calls:
            await asyncio.wait([call.task for call in self._calls.values()])

    async def _close(self) -> None:
        tasks = [*self._background, *(call.task for call in self._calls.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._adapters.close(), return_exceptions=True)
        await self._client.close()


def request_number(wire_id: str) -> int:
    """The executor's request id in the server's id of a request ("prefix-7") or of one of its sequences ("prefix-7/0").

    Raises ValueError.
    """
    return int(wire_id.rpartition("-")[2].partition("/")[0])


async def _make_client(addresses: str | Sequence[str], options: ClientOptions) -> AsyncClient:
    # A coroutine, so that the client is created on the event loop that it will use.
    return AsyncClient(addresses, **options)


@cache
def _shared_loop() -> tuple[Creator, asyncio.AbstractEventLoop]:
    """The event loop of all executors of this process, in a daemon thread that forks do not have."""
    # Shared and never closed, because grpc.aio has one completion queue per process: an event for a loop that has been
    # closed would raise an error in another loop.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="sluice executor", daemon=True).start()
    return Creator(), loop


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
