"""The submitted requests of an executor: their ids, and which of them have something to read."""

import itertools
import threading
import uuid
from collections.abc import Callable
from functools import partial

from sluice.executor.call import PendingCall
from sluice.executor.chunk_queue import ChunkQueue
from sluice.executor.errors import SHUT_DOWN
from sluice.executor.request import GenerationRequest
from sluice.executor.response import Response
from sluice.executor.result import GenerationResult, Submitter
from sluice.executor.session import Session
from sluice.executor.waiting import Deadline, wait_for


class Submissions:
    """Numbers requests and sends them through the session."""

    def __init__(self, session: Session) -> None:
        self.ready = ReadySet()
        self._session = session
        self._ids = itertools.count(1)
        # Requests of all executors share the server's request ids.
        self._name = uuid.uuid4().hex[:12]

    def submit(
        self,
        request: GenerationRequest,
        submitter: Submitter,
        on_end: Callable[[GenerationResult], None] | None = None,
        patient: bool = False,
    ) -> GenerationResult:
        """`patient`: retry while the server is overloaded. Raises RuntimeError once the session is closed."""
        request_id = next(self._ids)
        queue = ChunkQueue(partial(self.ready.mark, request_id))
        result = GenerationResult(request_id, request, queue, submitter)
        # Before sending, so that no response finds its request unknown.
        self.ready.add(result)
        notify = partial(on_end, result) if on_end else None
        try:
            self._session.submit(PendingCall(self._wire_id(request_id), request, queue, patient, notify))
        except BaseException:
            self.ready.forget(request_id)
            raise
        return result

    def abort(self, request_id: int) -> None:
        self._session.abort(self._wire_id(request_id))

    def cancel(self, results: list[GenerationResult]) -> None:
        """Also discards what was received."""
        self._session.cancel([self._wire_id(result.request_id) for result in results if not result.done])
        for result in results:
            self.ready.forget(result.request_id)

    def request_id(self, wire_id: str) -> int | None:
        """None for a request of another client."""
        return request_number(wire_id) if wire_id.rpartition("-")[0] == self._name else None

    def _wire_id(self, request_id: int) -> str:
        return f"{self._name}-{request_id}"


def request_number(wire_id: str) -> int:
    """The request id behind what services call a request of an executor, or one of its sequences. Raises ValueError."""
    return int(wire_id.rpartition("-")[2].partition("/")[0])


class ReadySet:
    """Results by request id, from the request's start until its end has been read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._open: dict[int, GenerationResult] = {}
        self._marked: dict[int, None] = {}
        self._closed = False

    def add(self, result: GenerationResult) -> None:
        with self._lock:
            self._open[result.request_id] = result

    def find(self, request_id: int) -> GenerationResult:
        """Raises ValueError for an unknown request."""
        try:
            return self._open[request_id]
        except KeyError:
            raise ValueError(f"no request {request_id}: never submitted, or its end has been read") from None

    def mark(self, request_id: int) -> None:
        with self._lock:
            if request_id in self._open:
                self._marked[request_id] = None
                self._condition.notify_all()

    def forget(self, request_id: int) -> None:
        """Its end was read, or is not wanted."""
        with self._lock:
            self._open.pop(request_id, None)
            self._marked.pop(request_id, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._condition.notify_all()

    def read_any(self, deadline: Deadline) -> list[tuple[GenerationResult, list[Response]]]:
        """Empty at the deadline. Raises RuntimeError once closed and empty."""
        found: list[tuple[GenerationResult, list[Response]]] = []
        # Again, if another reader was faster: a mark only says that there was something to read.
        while not found and (marked := self._take(deadline.left)):
            for result in marked:
                if responses := result.read_within(Deadline(0.0)):
                    found.append((result, responses))
        return found

    def _take(self, timeout: float | None) -> list[GenerationResult]:
        with self._lock:
            wait_for(self._condition, lambda: bool(self._marked) or self._closed, timeout)
            if self._closed and not self._marked:
                raise RuntimeError(SHUT_DOWN)
            marked, self._marked = self._marked, {}
            return [self._open[request_id] for request_id in marked]
