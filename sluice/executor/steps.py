"""What the engines report, until somebody asks for it."""

import threading
from collections import deque
from collections.abc import Callable

from sluice.client import SluiceError
from sluice.executor.errors import SHUT_DOWN
from sluice.executor.times import Timeout
from sluice.executor.waiting import wait_for
from sluice.v1 import admin_pb2 as pb


class StepsLog:
    """The newest `limit` steps, and news of the `limit` newest requests, that nobody has asked for yet."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._steps: deque[pb.EngineStats] = deque(maxlen=limit)
        self._requests: dict[str, pb.RequestStats] = {}
        self._error: SluiceError | None = None
        self._closed = False

    def put(self, response: pb.StreamStepsResponse) -> None:
        """Keep what came."""
        with self._lock:
            self._steps.extend(response.steps)
            for each in response.requests:
                self._requests.pop(each.request_id, None)
                self._requests[each.request_id] = each
            while len(self._requests) > self.limit:
                del self._requests[next(iter(self._requests))]
            self._condition.notify_all()

    def fail(self, error: SluiceError) -> None:
        """Nothing will come, for this reason."""
        with self._lock:
            self._error = error
            self._condition.notify_all()

    def close(self) -> None:
        """Nothing more will come."""
        with self._lock:
            self._closed = True
            self._condition.notify_all()

    def take_steps(self, timeout: Timeout) -> list[pb.EngineStats]:
        """Oldest first; empty if there are none within the timeout.

        Raises SluiceError; RuntimeError once closed, if nothing is left.
        """
        with self._lock:
            self._wait(lambda: bool(self._steps), timeout)
            found = list(self._steps)
            self._steps.clear()
            return found

    def take_requests(self, timeout: Timeout) -> list[pb.RequestStats]:
        """The latest of each request, those changed last at the end; otherwise as `take_steps`."""
        with self._lock:
            self._wait(lambda: bool(self._requests), timeout)
            found, self._requests = list(self._requests.values()), {}
            return found

    def _wait(self, is_there: Callable[[], bool], timeout: Timeout) -> None:
        wait_for(self._condition, lambda: is_there() or self._closed or self._error is not None, timeout)
        if self._error is not None:
            raise self._error
        if self._closed and not is_there():
            raise RuntimeError(SHUT_DOWN)
