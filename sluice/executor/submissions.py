"""The submitted requests of an executor: their ids, and which of them have unread responses."""

import itertools
import threading
import uuid
from collections.abc import Callable
from functools import partial

from sluice.executor.call import PendingCall
from sluice.executor.chunk_queue import ChunkQueue
from sluice.executor.errors import SHUT_DOWN, check_type
from sluice.executor.forks import Creator
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
        # Request ids must be unique at the server, which other executors and clients may use too.
        self._prefix = uuid.uuid4().hex[:12]

    def check(self, request: GenerationRequest, argument: str = "request") -> None:
        """Raises TypeError, ValueError or RuntimeError, after the session was closed, for what `submit` refuses."""
        check_type(argument, request, GenerationRequest)
        if request.return_perf_metrics and not self._session.steps.limit:
            raise ValueError(
                f"{argument}: return_perf_metrics needs an executor with iter_stats_max_iterations above 0"
            )
        if not self._session.accepting:
            raise RuntimeError(SHUT_DOWN)

    def submit(
        self,
        request: GenerationRequest,
        submitter: Submitter,
        on_end: Callable[[GenerationResult], None] | None = None,
        patient: bool = False,
    ) -> GenerationResult:
        """Start a request. `on_end` is called once its end can be read; `patient`: retry while the server is
        overloaded.

        Raises like `check`.
        """
        self.check(request)
        request_id = next(self._ids)
        queue = ChunkQueue(partial(self.ready.mark, request_id))
        result = GenerationResult(request_id, request, queue, submitter)
        # Added before it is sent, so that responses always belong to a known request.
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
        """Cancel requests, and discard their unread responses."""
        self._session.cancel([self._wire_id(result.request_id) for result in results if not result.done])
        for result in results:
            self.ready.forget(result.request_id)

    def request_id(self, wire_id: str) -> int | None:
        """The request id of a request at the server; None if another client sent it."""
        return request_number(wire_id) if wire_id.rpartition("-")[0] == self._prefix else None

    def _wire_id(self, request_id: int) -> str:
        return f"{self._prefix}-{request_id}"


def request_number(wire_id: str) -> int:
    """The executor's request id in the server's id of a request ("prefix-7") or of one of its sequences ("prefix-7/0").

    Raises ValueError.
    """
    return int(wire_id.rpartition("-")[2].partition("/")[0])


class ReadySet:
    """The open results of an executor: from the start of a request until its end has been read or discarded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._open: dict[int, GenerationResult] = {}
        self._marked: dict[int, None] = {}
        self._closed = False
        self._creator = Creator()

    def add(self, result: GenerationResult) -> None:
        with self._lock:
            self._open[result.request_id] = result

    def find(self, request_id: int) -> GenerationResult:
        """The result of an open request. Raises ValueError for any other."""
        try:
            return self._open[request_id]
        except KeyError:
            raise ValueError(f"no request {request_id}: it was never submitted, or its end has been read") from None

    def mark(self, request_id: int) -> None:
        """Note that a request has something to read."""
        with self._lock:
            if request_id in self._open:
                self._marked[request_id] = None
                self._condition.notify_all()

    def forget(self, request_id: int) -> None:
        """Remove a request whose end was read, or need not be."""
        with self._lock:
            self._open.pop(request_id, None)
            self._marked.pop(request_id, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._condition.notify_all()

    def read_any(self, deadline: Deadline) -> list[tuple[GenerationResult, list[Response]]]:
        """Wait for responses of any request, and read them; empty at the deadline.

        Raises RuntimeError after `close`, once there is nothing to read, and in a fork.
        """
        self._creator.check()
        read: list[tuple[GenerationResult, list[Response]]] = []
        # In a loop, because another reader may have read the responses of a marked request already.
        while not read and (marked := self._take(deadline.left)):
            for result in marked:
                if responses := result.read_within(Deadline(0.0)):
                    read.append((result, responses))
        return read

    def _take(self, timeout: float | None) -> list[GenerationResult]:
        with self._lock:
            wait_for(self._condition, lambda: bool(self._marked) or self._closed, timeout)
            if self._closed and not self._marked:
                raise RuntimeError(SHUT_DOWN)
            marked, self._marked = self._marked, {}
            return [self._open[request_id] for request_id in marked]
