"""The connection of an executor: all its calls, on the event loop of all executors."""

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from sluice.client import (
    AsyncClient,
    AsyncSteps,
    Cancelled,
    ClientOptions,
    Forbidden,
    NotImplementedByServer,
    SluiceError,
    Unauthenticated,
)
from sluice.executor.call import Call
from sluice.executor.errors import SHUT_DOWN
from sluice.executor.loop import shared_loop
from sluice.executor.steps import StepsLog
from sluice.executor.times import Timeout
from sluice.executor.waiting import Deadline

T = TypeVar("T")

LOGGER = logging.getLogger("sluice.executor")

CONNECT_SECONDS = 30.0
CLOSE_SECONDS = 5.0
ABORT_AGAIN_SECONDS = 0.2
ABORT_TRIES = 10
STEPS_AGAIN_SECONDS = 1.0
NO_STATISTICS = (NotImplementedByServer, Unauthenticated, Forbidden)
"""AdminService may have a port and tokens of its own."""


class Session:
    """Sends calls, at most `max_in_flight` at once and the others in order. For any number of threads.

    Raises SluiceError where no server answers.
    """

    def __init__(
        self, addresses: str | Sequence[str], max_in_flight: int, steps: StepsLog, client_options: ClientOptions
    ) -> None:
        self._steps = steps
        self._calls: dict[str, Call] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._accepting = True
        self._closed = False
        self._owner = os.getpid()
        self._loop = shared_loop()
        self._room = asyncio.Semaphore(max_in_flight)
        self._client = self._wait(_make_client(addresses, client_options))
        try:
            self._wait(self._greet())
        except BaseException:
            self.close()
            raise

    def submit(self, call: Call) -> None:
        """Send it as soon as there is room. Raises RuntimeError once `finish` or `close` was called."""
        with self._lock:
            if not self._accepting:
                raise RuntimeError(SHUT_DOWN)
            self._loop.call_soon_threadsafe(self._start, call)

    def abort(self, wire_id: str) -> None:
        """Have the server end a request; one that it does not know is cancelled here. Does not wait."""
        self._call_soon(self._begin_abort, wire_id)

    def cancel(self, wire_ids: list[str]) -> None:
        """Drop requests. Does not wait."""
        self._call_soon(self._drop, wire_ids)

    def run(self, ask: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """One call of the client, waited for. Raises SluiceError; RuntimeError once closed."""
        if self._closed:
            raise RuntimeError(SHUT_DOWN)
        return self._wait(ask(self._client))

    @property
    def accepting(self) -> bool:
        """Whether a call can be submitted."""
        return self._accepting

    def finish(self, timeout: Timeout = None) -> bool:
        """Accept no more calls, and wait for those submitted so far. Returns whether all ended within the timeout."""
        if self._is_fork:
            return True
        with self._lock:
            self._accepting = False
            if self._closed:
                return True
            ended = asyncio.run_coroutine_threadsafe(self._all_ended(), self._loop)
        deadline = Deadline(timeout)
        while not ended.done() and deadline.left != 0:
            concurrent.futures.wait([ended], deadline.slice)
        return ended.done()

    def close(self) -> None:
        """Cancel everything and close the connection. Idempotent. Does nothing in a fork of the process."""
        if self._is_fork:
            return
        with self._lock:
            first, self._closed = not self._closed, True
            self._accepting = False
        if first:
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
            # A garbage collector may close it in the loop's own thread, where nobody can wait for it.
            if _runs_here(self._loop):
                return
            try:
                closing.result(CLOSE_SECONDS)
            except TimeoutError:
                LOGGER.warning("the connection did not close within %g s", CLOSE_SECONDS)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def _is_fork(self) -> bool:
        return os.getpid() != self._owner

    def _call_soon(self, do: Callable[..., None], *arguments: Any) -> None:
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(do, *arguments)

    # From here on, all runs in the loop's thread.

    async def _greet(self) -> None:
        await self._client.health(timeout=CONNECT_SECONDS)
        if self._steps.limit:
            steps = self._client.stream_steps()
            await steps.started()
            self._begin(self._follow(steps))

    def _start(self, call: Call) -> None:
        self._calls[call.wire_id] = call
        call.task = self._loop.create_task(call.run(self._client, self._room))
        call.task.add_done_callback(partial(self._ended, call))

    def _ended(self, call: Call, task: "asyncio.Task[None]") -> None:
        del self._calls[call.wire_id]
        call.end(Cancelled(SHUT_DOWN) if task.cancelled() else task.exception())

    def _begin_abort(self, wire_id: str) -> None:
        call = self._calls.get(wire_id)
        if call is not None:
            call.dropped = True
            self._begin(self._abort(call))

    async def _abort(self, call: Call) -> None:
        with suppress(SluiceError):
            for _ in range(ABORT_TRIES):
                if not call.sent:
                    break
                if call.task.done() or await self._client.abort(call.wire_id):
                    return
                # The server has not seen the request yet, or its answer is on the way.
                await asyncio.wait({call.task}, timeout=ABORT_AGAIN_SECONDS)
        call.task.cancel()

    def _drop(self, wire_ids: list[str]) -> None:
        for call in filter(None, map(self._calls.get, wire_ids)):
            call.dropped = True
            call.task.cancel()

    async def _follow(self, steps: AsyncSteps) -> None:
        while True:
            try:
                async for response in steps:
                    self._steps.put(response)
            except NO_STATISTICS as error:
                self._steps.fail(error)
                return
            except SluiceError as error:
                LOGGER.info("no statistics for now: %s", error)
            await asyncio.sleep(STEPS_AGAIN_SECONDS)
            steps = self._client.stream_steps()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def _all_ended(self) -> None:
        if self._calls:
            await asyncio.wait([call.task for call in self._calls.values()])

    async def _close(self) -> None:
        tasks = [*self._chores, *(call.task for call in self._calls.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()


async def _make_client(addresses: str | Sequence[str], options: ClientOptions) -> AsyncClient:
    """In the loop it belongs to."""
    return AsyncClient(addresses, **options)


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
