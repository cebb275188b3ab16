"""The results of calls to all routers: a result or an error of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sluice.client.connection import Router
from sluice.client.errors import AdapterNotFound, SluiceError

PAGE_SIZE = 1000

T = TypeVar("T")
"""What a call returns of each router."""


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


@dataclass(frozen=True)
class AdapterCatalog(Generic[T]):
    """Reads the answers of calls about one kind of adapters. Methods raise the first error if every router failed."""

    of_router: Callable[..., T]
    """Class of the result of one router."""
    adapter: str
    """Field of an answer that has one adapter."""
    adapters: str
    """Field that has several, of an answer and of `of_router`."""
    read: Callable[[Any], Any]
    """Reads an adapter of an answer."""
    list_request: Callable[..., Any]
    """Class of the message that lists them."""

    def loaded(self, addresses: Sequence[str], answers: Sequence[Any]) -> list[T]:
        """Read answers of calls that load an adapter, or errors."""
        results = [_failed(answer) or (self.read(getattr(answer, self.adapter)),) for answer in answers]
        return self._each(addresses, results)

    def unloaded(self, addresses: Sequence[str], answers: Sequence[Any]) -> list[T]:
        """Read answers of calls that unload an adapter, or errors."""
        results = [_failed(answer) or () for answer in answers]
        if () in results:
            # Routers pass changes on to each other, so a router may have unloaded the adapter before our call arrived.
            results = [() if isinstance(result, AdapterNotFound) else result for result in results]
        return self._each(addresses, results)

    def listing(self, router: Router) -> Listing:
        return Listing(router, self.list_request, lambda answer: list(map(self.read, getattr(answer, self.adapters))))

    def listed(self, addresses: Sequence[str], lists: Sequence[Listing]) -> list[T]:
        """Read the complete lists of all routers."""
        return self._each(addresses, [listing.result for listing in lists])

    def _each(self, addresses: Sequence[str], results: Sequence[Any]) -> list[T]:
        """`results`: a tuple of adapters, or an error, of each router."""
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            # An exception of another type is a defect of this program.
            if not isinstance(error, SluiceError) or len(errors) == len(results):
                raise error
        return [
            self.of_router(address, **{"error" if isinstance(result, SluiceError) else self.adapters: result})
            for address, result in zip(addresses, results, strict=True)
        ]


def _failed(answer: Any) -> BaseException | None:
    """The answer, if it is an error."""
    return answer if isinstance(answer, BaseException) else None
