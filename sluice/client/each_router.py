"""The results of calls to all routers: a result or an error of each."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sluice.client.connection import Router
from sluice.client.errors import AdapterNotFound, SluiceError

PAGE_SIZE = 1000

T = TypeVar("T")


class Listing:
    """The pages of a list call that one router has returned so far."""

    def __init__(self, router: Router, request: Callable[..., Any], read: Callable[[Any], Sequence[Any]]) -> None:
        """`request`: class of the request message. `read`: returns the items of a response."""
        self.router = router
        self.is_complete = False
        self._request = request
        self._read = read
        self._token = ""
        self._items: list[Any] = []
        self._error: BaseException | None = None

    def next_request(self) -> Any:
        return self._request(page_size=PAGE_SIZE, page_token=self._token)

    def add(self, answer: Any) -> None:
        """Add a response, or the error that the call ended with."""
        if isinstance(answer, BaseException):
            self._error, self.is_complete = answer, True
            return
        self._items += self._read(answer)
        self._token = answer.next_page_token
        self.is_complete = not self._token

    @property
    def result(self) -> Any:
        """The items of all pages, or an error."""
        return self._error or tuple(self._items)


def each_result(addresses: Sequence[str], results: Sequence[Any], of_router: Callable[..., T]) -> list[T]:
    """Combine the results of all routers, each a tuple or an error, with `of_router(address, tuple)` or
    `of_router(address, error=error)`.

    Raises the first error if every router failed.
    """
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        # An exception of another type is a defect of this program.
        if not isinstance(error, SluiceError) or len(errors) == len(results):
            raise error
    return [
        of_router(address, error=result) if isinstance(result, SluiceError) else of_router(address, result)
        for address, result in zip(addresses, results, strict=True)
    ]


def failed(answer: Any) -> BaseException | None:
    """The answer, if it is an error."""
    return answer if isinstance(answer, BaseException) else None


def of_unloads(answers: Sequence[Any]) -> list[Any]:
    """Results of calls that unload an adapter: an empty tuple or an error of each router."""
    results = [failed(answer) or () for answer in answers]
    if () in results:
        # Routers pass changes on to each other, so a router may have unloaded the adapter before our call arrived.
        results = [() if isinstance(result, AdapterNotFound) else result for result in results]
    return results
