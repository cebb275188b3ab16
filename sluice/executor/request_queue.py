"""The request queue of an executor: submit requests, and read their responses by request id."""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import overload

from sluice.client import AsyncClient
from sluice.client.values import as_id, as_ids, is_id
from sluice.executor.request import GenerationRequest
from sluice.executor.response import Response
from sluice.executor.result import GenerationResult
from sluice.executor.session import Session
from sluice.executor.submissions import Submissions
from sluice.executor.waiting import Deadline, Timeout


class RequestQueue:
    """The part of `GenerationExecutor` that submits requests and reads responses by request id. Thread-safe."""

    _session: Session
    _submissions: Submissions

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Start a request. Errors of the request are reported by its result.

        Raises TypeError unless it is a GenerationRequest, ValueError for one with `return_perf_metrics` if the executor
        keeps no statistics, RuntimeError after `shutdown`.
        """
        return self._submissions.submit(request, self)

    def abort_request(self, request_id: int) -> None:
        """Stop a request. It ends shortly after with finish reason "cancelled" and the tokens so far.

        Has no effect on a request that has already ended.
        """
        self._submissions.abort(request_id)

    def enqueue_request(self, request: GenerationRequest) -> int:
        """Submit a request and return its id for `await_responses`. Raises RuntimeError after `shutdown`."""
        return self.submit(request).request_id

    def enqueue_requests(self, requests: Sequence[GenerationRequest]) -> list[int]:
        """Submit requests in order and return their ids. Raises like `submit`, before any is submitted."""
        for i, request in enumerate(requests):
            self._submissions.check(request, f"requests[{i}]")
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
        ready = self._submissions.ready
        if request_id is None:
            return [response for _, responses in ready.read_any(deadline) for response in responses]
        if is_id(request_id):
            return ready.find(as_id("request_id", request_id)).read_within(deadline)
        # All ids are checked first: an unknown one must not cost the responses of others.
        results = [ready.find(each) for each in as_ids("request_id", request_id)]
        return [result.read_within(deadline) for result in results]

    def read_any(self, timeout: Timeout = None) -> list[tuple[GenerationResult, list[Response]]]:
        """Like `await_responses()`, paired with the result that each list of responses was applied to."""
        return self._submissions.ready.read_any(Deadline(timeout))

    def tokenize(self, text: str, add_special_tokens: bool | None = None, model: str | None = None) -> list[int]:
        """Return the token ids of a text, as the server would tokenize it as a prompt. Raises SluiceError."""
        call = partial(AsyncClient.tokenize, text=text, model=model or "", add_special_tokens=add_special_tokens)
        return list(self._session.run(call).token_ids)

    def forget(self, request_id: int) -> None:
        """Discard the unread responses of a request. Not needed once the end of its result has been read."""
        self._submissions.ready.forget(request_id)
