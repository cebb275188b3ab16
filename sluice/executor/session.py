"""The connection of an executor: all its calls, on an event loop in a thread of its own."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from sluice.client import AsyncClient, AsyncSteps, Cancelled, NotImplementedByServer, SluiceError
from sluice.executor.call import Call
from sluice.executor.steps import StepsLog

T = TypeVar("T")

LOGGER = logging.getLogger("sluice.executor")

CONNECT_SECONDS = 30.0
CLOSE_SECONDS = 5.0
ABORT_AGAIN_SECONDS = 0.2
STEPS_AGAIN_SECONDS = 1.0
SHUT_DOWN = "the executor was shut down"


class Session:
    """Sends calls, at most `max_in_flight` at once and the others in order. For any number of threads.

    `client_options` are those of `AsyncClient`. Raises SluiceError where no server answers.
    """

    def __init__(self, address: str, max_in_flight: int, steps: StepsLog, client_options: dict[str, Any]) -> None:
        self._max_in_flight = max_in_flight
        self._steps = steps
        self._calls: dict[str, Call] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="sluice executor", daemon=True)
        self._thread.start()
        try:
            self._wait(self._open(address, client_options))
        except BaseException:
            self.close()
            raise

    def submit(self, call: Call) -> None:
        """Send it as soon as there is room. Raises RuntimeError once closed."""
        with self._lock:
            self._check_open()
            self._loop.call_soon_threadsafe(self._start, call)

    def abort(self, wire_id: str) -> None:
        """Have the server end a request; one that it does not know is cancelled here. Does not wait."""
        self._call_soon(self._begin_abort, wire_id)

    def cancel(self, wire_ids: list[str]) -> None:
        """Drop requests. Does not wait."""
        self._call_soon(self._drop, wire_ids)

    def run(self, ask: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """One call of the client, waited for. Raises SluiceError; RuntimeError once closed."""
        with self._lock:
            self._check_open()
            answer = asyncio.run_coroutine_threadsafe(ask(self._client), self._loop)
        return answer.result()

    def close(self) -> None:
        """Cancel everything and end the thread. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                self._loop.call_soon_threadsafe(self._begin_close)
        # A garbage collector may close it in its own thread.
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(SHUT_DOWN)

    def _call_soon(self, do: Callable[..., None], *arguments: Any) -> None:
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(do, *arguments)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # From here on, all runs in the thread.

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _open(self, address: str, client_options: dict[str, Any]) -> None:
        self._room = asyncio.Semaphore(self._max_in_flight)
        self._client = AsyncClient(address, **client_options)
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
            # The server may not have seen the request yet, or have answered it already.
            while call.sent and not call.task.done():
                if await self._client.abort(call.wire_id):
                    return
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
            except NotImplementedByServer as error:
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

    def _begin_close(self) -> None:
        closing = self._loop.create_task(self._close())
        closing.add_done_callback(lambda _: self._loop.stop())

    async def _close(self) -> None:
        tasks = [*self._chores, *(call.task for call in self._calls.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()
