"""What was received for one request and not read yet."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from sluice.client import Chunk, Timings, TokenLogprob, Usage
from sluice.executor.response import FinishReason
from sluice.executor.waiting import wait_for
from sluice.v1 import admin_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ending:
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: Exception | None = None
    unfinished: FinishReason | None = None
    """Finish reason of outputs without one from the server, if this side ended the request."""


@dataclass(frozen=True, slots=True)
class Unread:
    chunks: list[Chunk] = field(default_factory=list)
    ending: Ending | None = None
    stats: pb.RequestStats | None = None
    """The newest that were received, whether or not they were read before."""


class ChunkQueue:
    """Written by the session's thread, which calls `notify`; read by any thread or event loop."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._chunks: list[Chunk] = []
        self._ending: Ending | None = None
        self._stats: pb.RequestStats | None = None
        self._taken = False
        self._waiters: set[asyncio.Future[None]] = set()

    def put(self, chunk: Chunk) -> None:
        with self._lock:
            self._chunks.append(chunk)
            self._wake()
        self._notify()

    def put_stats(self, stats: pb.RequestStats) -> None:
        """Read together with what is put next."""
        with self._lock:
            self._stats = stats

    def end(self, ending: Ending, last: Iterable[Chunk] = ()) -> None:
        """`last`: read together with the end."""
        with self._lock:
            # A call may be cancelled after its end was queued.
            if self._ending is not None:
                return
            self._chunks.extend(last)
            self._ending = ending
            self._wake()
        self._notify()

    def read(self, apply: Callable[[Unread], T], timeout: float | None = None) -> T:
        """Wait, and apply all that can be read; nothing if another reader got the ending. Raises TimeoutError."""
        with self._lock:
            if not wait_for(self._condition, self._readable, timeout):
                raise TimeoutError(f"nothing was received within {timeout:g} s")
            # Under the lock: with several readers, chunks must be applied in order.
            return apply(self._take())

    def peek(self) -> Unread:
        """What can be read, without reading it."""
        with self._lock:
            return Unread() if self._taken else Unread(list(self._chunks), self._ending)

    async def aread(self, apply: Callable[[Unread], T]) -> T:
        """As `read`, in an event loop and without a timeout."""
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                if self._readable():
                    return apply(self._take())
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters.add(waiter)
            try:
                await waiter
            finally:
                with self._lock:
                    self._waiters.discard(waiter)

    def _readable(self) -> bool:
        return bool(self._chunks) or self._ending is not None

    def _take(self) -> Unread:
        if self._taken:
            return Unread()
        chunks, self._chunks = self._chunks, []
        self._taken = self._ending is not None
        return Unread(chunks, self._ending, self._stats)

    def _wake(self) -> None:
        self._condition.notify_all()
        for waiter in self._waiters:
            # The waiter's event loop may be closed by now.
            with suppress(RuntimeError):
                waiter.get_loop().call_soon_threadsafe(_resolve, waiter)
        self._waiters.clear()


def _resolve(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
