"""The log of statistics that an executor has received and its caller has not read yet."""

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
        self.latest_iteration = 0
        self.tokens_per_block = 1
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._steps: deque[pb.EngineStats] = deque(maxlen=limit)
        self._requests: dict[str, pb.RequestStats] = {}
        self._error: SluiceError | None = None
        self._closed = False

    def put(self, response: pb.StreamStepsResponse) -> None:
        with self._lock:
            self._steps.extend(response.steps)
            if response.steps:
                self.latest_iteration = response.steps[-1].iteration
                self.tokens_per_block = response.steps[-1].tokens_per_kv_block or 1
            for stats in response.requests:
                # Removed first, so that the dict is in order of change.
                self._requests.pop(stats.request_id, None)
                self._requests[stats.request_id] = stats
            while len(self._requests) > self.limit:
                del self._requests[next(iter(self._requests))]
            self._condition.notify_all()

    def fail(self, error: SluiceError) -> None:
        with self._lock:
            self._error = error
            self._condition.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._condition.notify_all()

    def take_steps(self, timeout: Timeout) -> list[pb.EngineStats]:
        """Wait for steps and return all of them, oldest first; empty at the timeout.

        Raises the SluiceError that ended the feed, even if steps remain; RuntimeError after `close`, once all steps
        have been returned.
        """
        with self._lock:
            self._wait(lambda: bool(self._steps), timeout)
            steps = list(self._steps)
            self._steps.clear()
            return steps

    def take_requests(self, timeout: Timeout) -> list[pb.RequestStats]:
        """Like `take_steps`: the latest statistics of each request, in order of change."""
        with self._lock:
            self._wait(lambda: bool(self._requests), timeout)
            requests, self._requests = list(self._requests.values()), {}
            return requests

    def _wait(self, ready: Callable[[], bool], timeout: Timeout) -> None:
        wait_for(self._condition, lambda: ready() or self._closed or self._error is not None, timeout)
        if self._error is not None:
            raise self._error
        if self._closed and not ready():
            raise RuntimeError(SHUT_DOWN)
