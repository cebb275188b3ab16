"""A logits processor that is a function of a user's program, which is another process on this machine."""

import select
import socket
import time
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import msgspec
from torch import Tensor

from sluice.ring.callbacks import SCHEME, Answer, Call, CalledSequence, Frames, NewestSequences


class CallbackError(Exception):
    """`outcome`: what the processor did, for clients too, such as "raised KeyError". The message is for the log."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class _Sent(NamedTuple):
    tokens: list[int]
    """The engine's own list, which grows. Kept so that no other list gets its id."""
    number: int
    size: int
    """Tokens that the last call had."""


class _Connection:
    """To the program, and what it has of each sequence."""

    def __init__(self, path: str, deadline: float) -> None:
        """Raises OSError."""
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self.frames = Frames(self._socket)
        self.unanswered = False
        """A call has exceeded its limit: its answer may still come."""
        self._sent: NewestSequences[_Sent] = NewestSequences()
        self._numbers = count()

    def sequence(self, request_id: str, client_id: int | None, tokens: list[int]) -> CalledSequence:
        sent = self._sent.pop(id(tokens))
        number = next(self._numbers) if sent is None else sent.number
        # The last token of a call may be one that its step followed, and that step may have failed since.
        keep = 0 if sent is None else max(min(sent.size, len(tokens)) - 1, 0)
        self._sent.put(id(tokens), _Sent(tokens, number, len(tokens)), len(tokens))
        return CalledSequence(number, request_id, client_id, keep, tokens[keep:])

    def answers(self, deadline: float) -> bool:
        """Wait for the beginning of an answer. False: none has arrived by the deadline."""
        # Unlike `select`, also for descriptors above 1024, which an engine has.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(deadline - time.monotonic(), 0.0) * 1000))

    def receive(self, rows: Sequence[memoryview], deadline: float) -> Answer:
        """Fills `rows`, unless the answer is an error. Raises OSError, ValueError."""
        found = self.frames.receive(Answer, deadline)
        size = sum(row.nbytes for row in rows)
        if found is None or found[1] != (0 if found[0].error is not None else size):
            raise OSError("the program has closed the connection")
        if found[1] and not all(self.frames.fill(row, deadline) for row in rows):
            raise OSError("the program has closed the connection")
        self.unanswered = False
        return found[0]


class Callback:
    """Calls one function of the program that listens at `address`, ipc:///path. Connects with the first call.

    The wait is bounded. While a call that has exceeded `seconds` is not answered, further ones fail at once, so that a
    function that hangs holds the engine up once.
    """

    def __init__(self, address: str, seconds: float) -> None:
        self._path = address.removeprefix(SCHEME)
        self._seconds = seconds
        self._connection: _Connection | None = None
        self._row_bytes: list[int] = []
        """Of the last call."""

    def one(
        self, request_id: str, logits: Tensor, token_ids: list[list[int]], stream: int | None, client_id: int | None
    ) -> None:
        """As a `Processor`."""
        self.batch([request_id], [logits], [token_ids], stream, [client_id])

    def batch(
        self,
        request_ids: list[str],
        logits: list[Tensor],
        token_ids: list[list[list[int]]],
        _stream: int | None,
        client_ids: list[int | None],
    ) -> None:
        """As a `BatchedProcessor`."""
        rows = [each.view(-1).cpu() for each in logits]
        called = list(zip(request_ids, client_ids, (ids[0] for ids in token_ids), strict=True))
        try:
            answer = self._ask(called, [row.numpy().data for row in rows])
        except (OSError, ValueError, msgspec.DecodeError) as error:
            self._close()
            raise CallbackError("cannot be reached", f"{self._path}: {error}") from error
        if answer.error is not None:
            raise CallbackError(f"raised {answer.error}", answer.detail)
        for row, each in zip(rows, logits, strict=True):
            if each.device.type != "cpu":
                each.view(-1).copy_(row)

    def _ask(self, called: Sequence[tuple[str, int | None, list[int]]], rows: list[memoryview]) -> Answer:
        deadline = time.monotonic() + self._seconds
        connection = self._connected(deadline)
        call = Call([connection.sequence(*each) for each in called])
        connection.frames.send(call, rows, deadline)
        self._row_bytes = [row.nbytes for row in rows]
        if not connection.answers(deadline):
            connection.unanswered = True
            raise CallbackError(f"did not answer within {self._seconds:g} s", self._path)
        return connection.receive(rows, deadline)

    def _connected(self, deadline: float) -> _Connection:
        connection = self._connection
        if connection is not None and connection.unanswered:
            if not connection.answers(0.0):
                raise CallbackError("has not returned from an earlier call", self._path)
            connection.receive([memoryview(bytearray(size)) for size in self._row_bytes], deadline)
        if connection is None:
            connection = self._connection = _Connection(self._path, deadline)
        return connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.frames.close()
            self._connection = None
