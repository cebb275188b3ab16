"""Buffers the engines' statistics until the caller reads them."""

import threading
from collections import deque
from collections.abc import Callable

from sluice.client import SluiceError
from sluice.executor.errors import SHUT_DOWN
from sluice.executor.waiting import Timeout, wait_for
from sluice.v1 import admin_pb2 as pb


class StepsLog:
    """Keeps the newest `limit` steps, and the latest statistics of the `limit` requests that changed last."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._steps: deque[pb.EngineStats] = deque(maxlen=limit)
        self._requests: dict[str, pb.RequestStats] = {}
        self._error: SluiceError | None = None
        self._closed = False

    def put(self, response: pb.StreamStepsResponse) -> None:
        with self._lock:
            self._steps.extend(response.steps)
            for each in response.requests:
                self._requests.pop(each.request_id, None)
                self._requests[each.request_id] = each
            while len(self._requests) > self.limit:
                del self._requests[next(iter(self._requests))]
            self._condition.notify_all()

    def fail(self, error: SluiceError) -> None:
        """No statistics are available, for this reason."""
        with self._lock:
            self._error = error
            self._condition.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._condition.notify_all()

    def take_steps(self, timeout: Timeout) -> list[pb.EngineStats]:
        """Oldest first; empty at the timeout. Raises SluiceError; RuntimeError once closed and empty."""
        with self._lock:
            self._wait(lambda: bool(self._steps), timeout)
            found = list(self._steps)
            self._steps.clear()
            return found

    def take_requests(self, timeout: Timeout) -> list[pb.RequestStats]:
        """The latest statistics of each request, in order of change; otherwise as `take_steps`."""
        with self._lock:
            self._wait(lambda: bool(self._requests), timeout)
            found, self._requests = list(self._requests.values()), {}
            return found

    def _wait(self, ready: Callable[[], bool], timeout: Timeout) -> None:
        wait_for(self._condition, lambda: ready() or self._closed or self._error is not None, timeout)
        if self._error is not None:
            raise self._error
        if self._closed and not ready():
            raise RuntimeError(SHUT_DOWN)
