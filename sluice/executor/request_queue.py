"""The request queue of an executor: submit requests, and read their responses by request id."""

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import overload

from sluice.client import AsyncClient
from sluice.client.values import as_id, as_ids, is_id
from sluice.executor.call import PendingCall
from sluice.executor.chunk_queue import ChunkQueue
from sluice.executor.errors import SHUT_DOWN, check_type
from sluice.executor.report_logs import Inbox
from sluice.executor.request import GenerationRequest
from sluice.executor.response import Response
from sluice.executor.result import GenerationResult
from sluice.executor.session import Session
from sluice.executor.waiting import Deadline, Timeout


class RequestQueue:
    """The part of `GenerationExecutor` that submits requests and reads responses by request id. Thread-safe."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ready = ReadySet()
        self._ids = itertools.count(1)

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Start a request. Errors of the request are reported by its result.

        Raises TypeError unless it is a GenerationRequest, ValueError for one with `return_perf_metrics` if the executor
        keeps no statistics, RuntimeError after `shutdown`.
        """
        return self._submit(request)

    def abort_request(self, request_id: int) -> None:
        """Stop a request. It ends shortly after with finish reason "cancelled" and the tokens so far.

        Has no effect on a request that has already ended.
        """
        self._session.abort(request_id)

    def enqueue_request(self, request: GenerationRequest) -> int:
        """Submit a request and return its id for `await_responses`. Raises RuntimeError after `shutdown`."""
        return self.submit(request).request_id

    def enqueue_requests(self, requests: Sequence[GenerationRequest]) -> list[int]:
        """Submit requests in order and return their ids. Raises like `submit`, before any is submitted."""
        for i, request in enumerate(requests):
            self._check(request, f"requests[{i}]")
        return [self.enqueue_request(request) for request in requests]

    def can_enqueue_requests(self) -> bool:
        """Whether requests can be submitted: False after `shutdown` was called."""
        return self._session.accepting

    cancel_request = abort_request

    @overload
    def await_responses(self, request_id: int | timedelta | None = None, timeout: Timeout = None) -> list[Response]: ...

    @overload
    def await_responses(self, request_id: Sequence[int], timeout: Timeout = None) -> list[list[Response]]: ...

    def await_responses(
        self, request_id: int | Sequence[int] | timedelta | None = None, timeout: Timeout = None
    ) -> list[Response] | list[list[Response]]:
        """Wait for and read responses of one request (an id), of each of several (ids), or of any request (None).

        Returns an empty list at the timeout, which is in seconds or a timedelta; a timedelta may also be the only
        argument. Responses read here are applied to the request's `GenerationResult`. Raises ValueError for a request
        that was never submitted or whose end has been read; RuntimeError after `shutdown`, once all is read.
        """
        if isinstance(request_id, timedelta):
            if timeout is not None:
                raise TypeError("await_responses got two timeouts: a timedelta in place of request_id, and timeout")
            request_id, timeout = None, request_id
        deadline = Deadline(timeout)
        if request_id is None:
            return [response for _, responses in self._ready.read_any(deadline) for response in responses]
        if is_id(request_id):
            return self._ready.find(as_id("request_id", request_id)).read_within(deadline)
        # All ids are checked first: an unknown one must not cost the responses of others.
        results = [self._ready.find(each) for each in as_ids("request_id", request_id)]
        return [result.read_within(deadline) for result in results]

    def read_any(self, timeout: Timeout = None) -> list[tuple[GenerationResult, list[Response]]]:
        """Like `await_responses()`, paired with the result that each list of responses was applied to."""
        return self._ready.read_any(Deadline(timeout))

    def tokenize(self, text: str, add_special_tokens: bool | None = None, model: str | None = None) -> list[int]:
        """Return the token ids of a text, as the server would tokenize it as a prompt. Raises SluiceError."""
        call = partial(AsyncClient.tokenize, text=text, model=model or "", add_special_tokens=add_special_tokens)
        return list(self._session.run(call).token_ids)

    def forget(self, request_id: int) -> None:
        """Discard the unread responses of a request. Not needed once the end of its result has been read."""
        self._ready.forget(request_id)

    def _check(self, request: GenerationRequest, argument: str = "request") -> None:
        """Raises TypeError or ValueError for what `submit` refuses, RuntimeError if the session is closed."""
        check_type(argument, request, GenerationRequest)
        if request.return_perf_metrics and not self._session.steps.limit:
            raise ValueError(
                f"{argument}: return_perf_metrics needs an executor with iter_stats_max_iterations above 0"
            )
        if not self._session.accepting:
            raise RuntimeError(SHUT_DOWN)

    def _submit(
        self,
        request: GenerationRequest,
        on_end: Callable[[GenerationResult], None] | None = None,
        patient: bool = False,
    ) -> GenerationResult:
        """Start a request. `on_end` is called once its end can be read; `patient`: retry while the server is
        overloaded.

        Raises like `submit`.
        """
        self._check(request)
        request_id = next(self._ids)
        queue = ChunkQueue(partial(self._ready.mark, request_id))
        result = GenerationResult(request_id, request, queue, self)
        # Added before it is sent, so that responses always belong to a known request.
        self._ready.add(result)
        notify = partial(on_end, result) if on_end else None
        try:
            self._session.submit(PendingCall(self._session.wire_id(request_id), request, queue, patient, notify))
        except BaseException:
            self._ready.forget(request_id)
            raise
        return result

    def _cancel(self, results: list[GenerationResult]) -> None:
        """Cancel requests, and discard their unread responses."""
        self._session.cancel([result.request_id for result in results if not result.done])
        for result in results:
            self._ready.forget(result.request_id)


class ReadySet(Inbox):
    """The open results of an executor: from the start of a request until its end has been read or discarded."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, GenerationResult] = {}
        self._marked: dict[int, None] = {}

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

    def read_any(self, deadline: Deadline) -> list[tuple[GenerationResult, list[Response]]]:
        """Wait for responses of any request, and read them; empty at the deadline.

        Raises RuntimeError after `close`, once there is nothing to read, and in a fork.
        """
        read: list[tuple[GenerationResult, list[Response]]] = []
        # In a loop, because another reader may have read the responses of a marked request already.
        while not read and (marked := self._take_marked(deadline.left)):
            for result in marked:
                if responses := result.read_within(Deadline(0.0)):
                    read.append((result, responses))
        return read

    def _take_marked(self, timeout: float | None) -> list[GenerationResult]:
        with self._lock:
            self._wait(lambda: bool(self._marked), timeout)
            marked, self._marked = self._marked, {}
            return [self._open[request_id] for request_id in marked]
