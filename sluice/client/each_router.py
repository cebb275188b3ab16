"""What each router of a list has answered, where a call goes to all of them: results beside errors."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sluice.client.connection import Router
from sluice.client.errors import AdapterNotFound, SluiceError

PAGE_SIZE = 1000

T = TypeVar("T")


class Listing:
    """What one router has listed so far, page by page."""

    def __init__(self, router: Router, request: Callable[..., Any], read: Callable[[Any], Sequence[Any]]) -> None:
        """`request`: the message's class. `read`: the items of a response."""
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
        """A response, or an error."""
        if isinstance(answer, BaseException):
            self._error, self.is_complete = answer, True
            return
        self._items += self._read(answer)
        self._token = answer.next_page_token
        self.is_complete = not self._token

    @property
    def result(self) -> Any:
        """The items, or an error."""
        return self._error or tuple(self._items)


def each_result(addresses: Sequence[str], results: Sequence[Any], of_router: Callable[..., T]) -> list[T]:
    """`results`: a tuple or an error of each router. `of_router`: from an address and a tuple, or `error`.

    Raises the first error if no router did what was asked.
    """
    errors = [each for each in results if isinstance(each, BaseException)]
    for error in errors:
        # Anything else is a fault of this program.
        if not isinstance(error, SluiceError) or len(errors) == len(results):
            raise error
    return [
        of_router(address, error=each) if isinstance(each, SluiceError) else of_router(address, each)
        for address, each in zip(addresses, results, strict=True)
    ]


def failed(answer: Any) -> BaseException | None:
    return answer if isinstance(answer, BaseException) else None


def of_unloads(answers: Sequence[Any]) -> list[Any]:
    """Results of calls that unload an adapter."""
    results = [failed(each) or () for each in answers]
    if () in results:
        # Routers pass changes on to each other: one may have unloaded it before our call came.
        results = [() if isinstance(each, AdapterNotFound) else each for each in results]
    return results
