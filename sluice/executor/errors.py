"""The exception of a failed request, and checks of arguments."""

from typing import Any

from sluice.client import RankAnswer, SluiceError

SHUT_DOWN = "the executor was shut down"


class RequestError(RuntimeError):
    """A request failed. The type of `error` tells why; other requests of the executor are unaffected."""

    def __init__(self, request_id: int, client_id: int | None, error: Exception) -> None:
        super().__init__(f"request {request_id}: {error}")
        self.request_id = request_id
        self.client_id = client_id
        self.error = self.__cause__ = error
        """Usually a `sluice.client.SluiceError`, such as InvalidRequest, which names each invalid field, Overloaded or
        Unavailable."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.request_id, self.client_id, self.error)

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return isinstance(self.error, SluiceError) and self.error.retryable


class CollectiveRpcError(RuntimeError):
    """A method called with `collective_rpc` failed on some ranks; the message is the first error."""

    def __init__(self, answers: list[RankAnswer]) -> None:
        errors = [answer.error for answer in answers if answer.error is not None]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        super().__init__(f"{errors[0]}{more}")
        self.answers = answers
        """Values and errors of all ranks, by engine id, then rank."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.answers,)


def values_of(answers: list[RankAnswer]) -> list[Any]:
    """The values that the ranks returned. Raises CollectiveRpcError if a rank failed."""
    if any(answer.error is not None for answer in answers):
        raise CollectiveRpcError(answers)
    return [answer.value for answer in answers]


def either(name: str, value: Any, alias: str, aliased: Any) -> Any:
    """The value of an argument that has two names. Raises TypeError if neither is given, or both with other values."""
    if value is None and aliased is None:
        raise TypeError(f"{name} (or its alias {alias}) is missing")
    if value is not None and aliased is not None and value != aliased:
        raise TypeError(f"{name} and {alias} are the same argument, but their values differ: give one of them")
    return aliased if value is None else value


def check_name(argument: str, value: object, expected: str) -> None:
    """Raises TypeError unless `value` is a string; for example, if it is the class itself."""
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be {expected}, because another process looks it up (got {value!r})")


def check_type(argument: str, value: object, kind: type) -> None:
    """Raises TypeError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{argument} must be a {kind.__name__}, not {type(value).__name__}")
