"""Which requests of an executor have something to read."""

import threading

from sluice.executor.errors import SHUT_DOWN
from sluice.executor.response import Response
from sluice.executor.result import GenerationResult
from sluice.executor.waiting import Deadline, wait_for


class ReadySet:
    """Results by request id, from the request's start until its end has been read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._open: dict[int, GenerationResult] = {}
        self._marked: dict[int, None] = {}
        self._closed = False

    def add(self, result: GenerationResult) -> None:
        """From now on it may have something to read."""
        with self._lock:
            self._open[result.request_id] = result

    def find(self, request_id: int) -> GenerationResult:
        """Raises ValueError where there is none."""
        try:
            return self._open[request_id]
        except KeyError:
            raise ValueError(f"no request {request_id}: never submitted, or its end has been read") from None

    def mark(self, request_id: int) -> None:
        """It has something to read."""
        with self._lock:
            if request_id in self._open:
                self._marked[request_id] = None
                self._condition.notify_all()

    def forget(self, request_id: int) -> None:
        """Its end has been read, or nobody will read it."""
        with self._lock:
            self._open.pop(request_id, None)
            self._marked.pop(request_id, None)

    def close(self) -> None:
        """Nothing more will come."""
        with self._lock:
            self._closed = True
            self._condition.notify_all()

    def read_any(self, deadline: Deadline) -> list[Response]:
        """Wait until some have something to read, and read it; empty if nothing came until the deadline.

        Raises RuntimeError once closed, if nothing is left.
        """
        responses: list[Response] = []
        while not responses and (marked := self._take(deadline.left)):
            for result in marked:
                responses += result.read_within(Deadline(0.0))
        return responses

    def _take(self, timeout: float | None) -> list[GenerationResult]:
        with self._lock:
            wait_for(self._condition, lambda: bool(self._marked) or self._closed, timeout)
            if self._closed and not self._marked:
                raise RuntimeError(SHUT_DOWN)
            marked, self._marked = self._marked, {}
            return [self._open[request_id] for request_id in marked]
