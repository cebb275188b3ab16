"""Tensor rows that were received for a request and not yet delivered to its client."""

from collections import deque
from collections.abc import Iterator, Sequence

from router.requests.appended import Appended
from sluice.wire.tensors import NO_TENSORS, TensorParams, TensorRows

MAX_WHOLE_BYTES = 48 << 20
"""Limit for all tensors in the response of Generate, which is a single message. A stream has no limit."""
Key = tuple[int | None, str]
"""(sequence, or None for the prompt; name of the tensor)"""


class _Rows:
    __slots__ = ("nbytes", "parts", "received")

    def __init__(self, received: int) -> None:
        self.received = received
        """Number of rows received, in this stream or before it was resumed."""
        self.parts: deque[TensorRows] = deque()
        """Undelivered rows; the last part ends at row `received`."""
        self.nbytes = 0
        """Size of `parts` in bytes."""

    def append(self, part: TensorRows) -> Appended:
        if part.start > self.received:
            return Appended.HOLE
        if part.end <= self.received:
            return Appended.SEEN
        new = part.between(self.received, part.end)
        self.parts.append(new)
        self.nbytes += len(new.data)
        self.received = part.end
        return Appended.TAKEN

    def take(self, end: int) -> Iterator[TensorRows]:
        """Remove and return the undelivered rows before row `end`."""
        while self.parts and self.parts[0].start < end:
            part = self.parts.popleft()
            if part.end > end:
                self.parts.appendleft(part.between(end, part.end))
                part = part.between(part.start, end)
            self.nbytes -= len(part.data)
            yield part

    def truncate(self, end: int) -> None:
        """Drop the rows from `end` on, none of which may have been delivered."""
        while self.parts and self.parts[-1].end > end:
            part = self.parts.pop()
            self.nbytes -= len(part.data)
            if part.start < end:
                head = part.between(part.start, end)
                self.parts.append(head)
                self.nbytes += len(head.data)
        self.received = min(self.received, end)


class TensorLog:
    """The tensors of one request."""

    def __init__(self, wanted: TensorParams, num_prompt: int, n: int) -> None:
        """`wanted`: the requested tensors, and the rows that the client already has. `num_prompt`: number of prompt
        tokens. `n`: number of sequences."""
        self.wanted = wanted
        self.progress = 0
        """Number of rows received, over all tensors."""
        self._num_prompt = num_prompt
        self._n = n
        self._rows: dict[Key, _Rows] = {}
        self.forget()

    def forget(self) -> None:
        """Drop all rows: their attempt was lost, and the next one may use a different model."""
        wanted = self.wanted
        self._rows = {(None, name): _Rows(wanted.context_rows) for name in wanted.context}
        for index in range(self._n):
            received = wanted.output_rows.get(index, 0)
            self._rows |= {(index, name): _Rows(received) for name in wanted.output}

    @property
    def nbytes(self) -> int:
        """Size in bytes of the undelivered rows."""
        return sum(rows.nbytes for rows in self._rows.values())

    def append(self, part: TensorRows) -> Appended:
        rows = self._rows.get((None if part.context else part.sequence, part.name))
        # Ignore rows of unknown tensors and beyond the prompt, which no engine should send.
        if rows is None or (part.context and part.end > self._num_prompt):
            return Appended.SEEN
        appended = rows.append(part)
        if appended is Appended.TAKEN:
            self.progress += part.rows
        return appended

    def is_complete(self, sequence: int, tokens: int) -> bool:
        """Whether all rows of the prompt, and of the first `tokens` tokens of a sequence, have arrived."""
        wanted = self.wanted
        return all(self._rows[None, name].received >= self._num_prompt for name in wanted.context) and all(
            self._rows[sequence, name].received >= tokens for name in wanted.output
        )

    def missing(self, sequences: Sequence[int]) -> TensorParams:
        """The rows that another attempt with these sequences has to compute."""
        context_rows = min((self._rows[None, name].received for name in self.wanted.context), default=0)
        output_rows = {
            index: min(self._rows[index, name].received for name in self.wanted.output)
            for index in sequences
            if self.wanted.output
        }
        context = self.wanted.context if context_rows < self._num_prompt else ()
        output = {index: rows for index, rows in output_rows.items() if rows}
        return TensorParams(context, self.wanted.output, context_rows if context else 0, output)

    def truncate(self, sequence: int, tokens: int) -> None:
        """Drop rows of tokens that were not received: another attempt may sample different ones."""
        for name in self.wanted.output:
            self._rows[sequence, name].truncate(tokens)

    def take(self, sequence: int, tokens: int) -> Iterator[TensorRows]:
        """Remove and return the rows of the prompt and of the first `tokens` tokens of a sequence."""
        for name in self.wanted.context:
            yield from self._rows[None, name].take(self._num_prompt)
        for name in self.wanted.output:
            yield from self._rows[sequence, name].take(tokens)

    def clear(self) -> None:
        """Drop all rows, and ignore those that still arrive: the reader has stopped."""
        self._rows.clear()
        self.wanted = NO_TENSORS
