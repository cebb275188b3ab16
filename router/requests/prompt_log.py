"""The log-probabilities of a request's prompt, kept until its client has received them."""

from collections.abc import Iterator

from router.requests.appended import Appended
from sluice.wire.prompt_logprobs import PromptLogprobs, Row, row_bytes, unpack


class PromptLog:
    """Stores the rows packed, because there may be a quarter of a million of them."""

    def __init__(self, rows: int, top: int) -> None:
        """`rows`: number of expected rows, one less than the prompt has tokens. `top`: alternatives per row."""
        self._awaited = rows
        self._top = top
        self._data = bytearray()
        self._delivered = False

    @property
    def received(self) -> int:
        return len(self._data) // row_bytes(self._top)

    @property
    def complete(self) -> bool:
        return self._delivered or self.received >= self._awaited

    def append(self, part: PromptLogprobs) -> Appended:
        if self._delivered:
            return Appended.SEEN
        if part.top != self._top or part.start > self.received or part.start + part.rows > self._awaited:
            return Appended.HOLE
        seen = self.received - part.start
        if seen >= part.rows:
            return Appended.SEEN
        self._data += part.data[seen * row_bytes(self._top) :]
        return Appended.TAKEN

    def forget(self) -> None:
        """Drop all rows: their attempt was lost, and the next one may use a different model."""
        self._data.clear()

    def mark_delivered(self) -> None:
        self._delivered = True
        self._data.clear()

    def rows(self) -> Iterator[Row]:
        """The rows received so far. The first row belongs to the prompt's second token."""
        return unpack(bytes(self._data), self._top)
