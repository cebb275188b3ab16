"""A logits processor that calls a separate function for each request."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sluice.executor.result import GenerationResult
from sluice.executor.submissions import request_number

if TYPE_CHECKING:
    from torch import Tensor


class RequestProcessors:
    """Calls the function of the request that is processed. Thread-safe.

    Give it to `GenerationExecutor.create` as one of the `logits_processors`, and let requests with a function name it.
    Import torch before the first of these requests: that takes seconds, and an engine's call has a time limit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: dict[int, Callable[..., Any]] = {}

    def submit(self, submit: Callable[[], GenerationResult], function: Callable[..., Any]) -> GenerationResult:
        """Submit a request with its function."""
        # Under the lock, because an engine may call the function before `submit` has returned the request's id.
        with self._lock:
            result = submit()
            self._functions[result.request_id] = function
        return result

    def forget(self, request_id: int) -> None:
        """Remove the function of a request that has ended, if it has one."""
        with self._lock:
            self._functions.pop(request_id, None)

    def __call__(
        self, name: str, logits: "Tensor", token_ids: list[list[int]], stream: None, client_id: int | None
    ) -> None:
        with self._lock:
            function = self._functions.get(request_number(name))
        # An engine may process one more token after the end of a request.
        if function is not None:
            function(name, logits, token_ids, stream, client_id)
