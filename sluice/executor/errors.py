"""The exception of a failed request, and checks of arguments."""

from typing import Any

from sluice.client import RankAnswer, SluiceError

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
        return isinstance(self.error, SluiceError) and self.error.retryable


class CollectiveRpcError(RuntimeError):
    """A method failed on some ranks; the message is the first error."""

    def __init__(self, answers: list[RankAnswer]) -> None:
        errors = [answer.error for answer in answers if answer.error is not None]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        super().__init__(f"{errors[0]}{more}")
        self.answers = answers
        """Of all ranks, in order: values and errors."""


def values_of(answers: list[RankAnswer]) -> list[Any]:
    """Raises CollectiveRpcError."""
    if any(answer.error is not None for answer in answers):
        raise CollectiveRpcError(answers)
    return [answer.value for answer in answers]


def either(name: str, value: Any, alias: str, aliased: Any) -> Any:
    """The value of an argument with two names. Raises TypeError if both are missing or they differ."""
    if value is None and aliased is None:
        raise TypeError(f"{name} (or its alias {alias}) is missing")
    if value is not None and aliased is not None and value != aliased:
        raise TypeError(f"{name} and {alias} are the same argument: give one of them")
    return aliased if value is None else value


def check_name(argument: str, value: object, expected: str) -> None:
    """Raises TypeError unless `value` is a string, for instance if it is the class itself."""
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be {expected}, which another process looks up; it is {value!r}")
