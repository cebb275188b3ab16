"""Timeouts for many operations with a single timer. `asyncio.timeout` would create one timer per operation."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Watchdog:
    """Limits the time of operations that all have the same timeout. The timer is set for the oldest running operation.

    Must be used on one event loop only.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """Timeout of one operation."""
        self._began: dict[Guard, float] = {}
        """Start time of each running operation, by the loop's clock; oldest first."""
        self._timer: asyncio.TimerHandle | None = None

    def guard(self, error: Callable[[], Exception]) -> "Guard":
        """A guard for successive operations of the current task. If one takes too long, it raises `error()`."""
        return Guard(self, error)

    def begin(self, guard: "Guard") -> None:
        loop = asyncio.get_running_loop()
        self._began[guard] = now = loop.time()
        if self._timer is None:
            self._timer = loop.call_at(now + self.seconds, self._expire_late)

    def end(self, guard: "Guard") -> None:
        self._began.pop(guard, None)

    def _expire_late(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for guard, began in list(self._began.items()):
            if began + self.seconds > loop.time():
                self._timer = loop.call_at(began + self.seconds, self._expire_late)
                return
            del self._began[guard]
            guard.expire()


class Guard:
    """A context manager that cancels its task when an operation, from `begin` to `end`, takes too long, and turns that
    cancellation into an error, so that the task may continue."""

    __slots__ = ("_cancelling", "_error", "_expired", "_task", "_watchdog")

    def __init__(self, watchdog: Watchdog, error: Callable[[], Exception]) -> None:
        self._watchdog = watchdog
        self._error = error
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._expired = False

    def begin(self) -> None:
        self._watchdog.begin(self)

    def end(self) -> None:
        self._watchdog.end(self)

    def expire(self) -> None:
        if self._task is not None:
            self._expired = True
            self._task.cancel()

    def __enter__(self) -> Self:
        """Raises RuntimeError outside a task."""
        self._task = asyncio.current_task()
        if self._task is None:
            raise RuntimeError("a guard needs a task")
        self._cancelling = self._task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        self._watchdog.end(self)
        # As in asyncio.Timeout: a cancellation from elsewhere, earlier or concurrent, remains a cancellation.
        timed_out = task is not None and self._expired and task.uncancel() <= self._cancelling
        if timed_out and isinstance(error, asyncio.CancelledError):
            raise self._error() from error
