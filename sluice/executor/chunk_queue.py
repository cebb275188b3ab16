"""The queue of received and unread chunks of one request."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from sluice.client import Chunk, Timings, TokenLogprob, Usage
from sluice.executor.forks import Creator
from sluice.executor.response import FinishReason
from sluice.executor.waiting import wait_for
from sluice.v1 import admin_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a request: its usage, or the error it failed with."""

    usage: Usage | None = None
    timings: Timings | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: Exception | None = None
    unfinished: FinishReason | None = None
    """If this side ended the request: the finish reason of outputs for which the server sent none."""
    refused_adapter: bool = False
    """Whether the request failed because its adapters could not be loaded, and another try would fail too."""


@dataclass(frozen=True, slots=True)
class Unread:
    """Everything received since the last read."""

    chunks: list[Chunk] = field(default_factory=list)
    ending: Ending | None = None
    stats: pb.RequestStats | None = None
    """The newest statistics received, whether or not they have been read before."""


class ChunkQueue:
    """Written by the session's thread, which calls `notify`; read by any thread or event loop."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._creator = Creator()
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._chunks: list[Chunk] = []
        self._ending: Ending | None = None
        self._stats: pb.RequestStats | None = None
        self._ending_read = False
        self._waiters: set[asyncio.Future[None]] = set()

    def put(self, chunk: Chunk) -> None:
        with self._lock:
            self._chunks.append(chunk)
            self._wake()
        self._notify()

    def put_stats(self, stats: pb.RequestStats) -> None:
        """Set the statistics that are read together with the next chunk or ending."""
        with self._lock:
            self._stats = stats

    def end(self, ending: Ending, last: Iterable[Chunk] = ()) -> None:
        """Queue the ending; `last` are chunks that are read together with it. Only the first ending counts."""
        with self._lock:
            # A call may be cancelled after its ending was queued.
            if self._ending is not None:
                return
            self._chunks.extend(last)
            self._ending = ending
            self._wake()
        self._notify()

    def read(self, apply: Callable[[Unread], T], timeout: float | None = None) -> T:
        """Wait until there is something to read, and apply all of it; an empty `Unread` once the ending has been read.

        Raises TimeoutError after `timeout` seconds, RuntimeError in a fork.
        """
        self._creator.check()
        with self._lock:
            if not wait_for(self._condition, self._is_readable, timeout):
                raise TimeoutError(f"nothing was received within {timeout:g} s")
            # Under the lock, so that several readers apply chunks in order.
            return apply(self._drain())

    def peek(self) -> Unread:
        """The unread chunks and ending, without reading them."""
        with self._lock:
            return Unread() if self._ending_read else Unread(list(self._chunks), self._ending)

    async def aread(self, apply: Callable[[Unread], T]) -> T:
        """Like `read`, without blocking the event loop, and without a timeout."""
        self._creator.check()
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                if self._is_readable():
                    return apply(self._drain())
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters.add(waiter)
            try:
                await waiter
            finally:
                with self._lock:
                    self._waiters.discard(waiter)

    def _is_readable(self) -> bool:
        return bool(self._chunks) or self._ending is not None

    def _drain(self) -> Unread:
        if self._ending_read:
            return Unread()
        chunks, self._chunks = self._chunks, []
        self._ending_read = self._ending is not None
        return Unread(chunks, self._ending, self._stats)

    def _wake(self) -> None:
        self._condition.notify_all()
        for waiter in self._waiters:
            # Raised if the waiter's event loop has been closed.
            with suppress(RuntimeError):
                waiter.get_loop().call_soon_threadsafe(_resolve, waiter)
        self._waiters.clear()


def _resolve(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
