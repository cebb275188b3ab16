"""The exception of a failed request."""

from sluice.client import SluiceError

SHUT_DOWN = "the executor was shut down"


class RequestError(RuntimeError):
    """A request failed; other requests of the executor are unaffected. The type of `error` says why."""

    def __init__(self, request_id: int, client_id: int | None, error: Exception) -> None:
        super().__init__(f"request {request_id}: {error}")
        self.request_id = request_id
        self.client_id = client_id
        self.error = error
        """A `sluice.client.SluiceError`, such as InvalidRequest (which names each field), Overloaded or Unavailable."""

    @property
    def retryable(self) -> bool:
        """The same request may succeed later."""
        return isinstance(self.error, SluiceError) and self.error.retryable
