"""Logits processors that run in a user's program, which is another process on this machine."""

import select
import socket
import time
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from sluice.wire.callbacks import SCHEME, Answer, CallbackCall, CalledSequence, Frames, NewestSequences


class CallbackError(Exception):
    """A call failed. The message is for the log."""

    def __init__(self, outcome: str, message: str) -> None:
        """`outcome`: what the processor did, such as "raised KeyError"; also reported to clients."""
        super().__init__(message)
        self.outcome = outcome

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.outcome, str(self))


class _Sent(NamedTuple):
    """What the program has received of a sequence."""

    tokens: list[int]
    """The engine's list, which grows. Sequences are identified by its id(), so keep it alive."""
    number: int
    size: int
    """Tokens that the last call sent or referred to."""


class _Connection:
    """A connection to the program, and what the program has received of each sequence."""

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
        """Whether a call has exceeded its time limit, so that its answer may still arrive."""
        self._sent: NewestSequences[_Sent] = NewestSequences()
        self._numbers = count()

    def sequence(self, request_id: str, client_id: int | None, tokens: list[int]) -> CalledSequence:
        sent = self._sent.pop(id(tokens))
        number = next(self._numbers) if sent is None else sent.number
        # The last token of a call may come from a step in flight that has failed since.
        keep = 0 if sent is None else max(min(sent.size, len(tokens)) - 1, 0)
        self._sent.put(id(tokens), _Sent(tokens, number, len(tokens)), len(tokens))
        return CalledSequence(number, request_id, client_id, keep, tokens[keep:])

    def answers(self, deadline: float) -> bool:
        """Wait for the first bytes of an answer. False: nothing has arrived by the deadline."""
        # Unlike `select`, `poll` supports descriptors above 1024, which an engine has.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(deadline - time.monotonic(), 0.0) * 1000))

    def receive(self, rows: Sequence[memoryview], deadline: float) -> Answer:
        """Receive an answer, and fill `rows` unless it is an error. Raises OSError, ValueError."""
        received = self.frames.receive(Answer, deadline)
        size = sum(row.nbytes for row in rows)
        if received is None or received[1] != (0 if received[0].error is not None else size):
            raise OSError("the program has closed the connection")
        if received[1] and not all(self.frames.fill(row, deadline) for row in rows):
            raise OSError("the program has closed the connection")
        self.unanswered = False
        return received[0]


class Callback:
    """Calls one function of the program that listens at the socket file `path`. Connects at the first call.

    A call takes at most `seconds`. While one that has exceeded this limit is unanswered, further calls fail
    immediately, so a function that hangs delays the engine only once.
    """

    def __init__(self, path: str, seconds: float) -> None:
        self._path = path
        self._seconds = seconds
        self._connection: _Connection | None = None
        self._row_bytes: list[int] = []
        """Bytes of each row of the last call."""

    @staticmethod
    def of(value: str, seconds: float) -> "Callback | None":
        """A callback if `value` is an ipc:// address; None if it is anything else, such as module:function."""
        return Callback(value.removeprefix(SCHEME), seconds) if value.startswith(SCHEME) else None

    def one(
        self, request_id: str, logits: Tensor, token_ids: list[list[int]], stream: int | None, client_id: int | None
    ) -> None:
        """A `Processor`."""
        self.batch([request_id], [logits], [token_ids], stream, [client_id])

    def batch(
        self,
        request_ids: list[str],
        logits: list[Tensor],
        token_ids: list[list[list[int]]],
        _stream: int | None,
        client_ids: list[int | None],
    ) -> None:
        """A `BatchedProcessor`."""
        rows = [tensor.view(-1).cpu() for tensor in logits]
        called = list(zip(request_ids, client_ids, (ids[0] for ids in token_ids), strict=True))
        try:
            answer = self._call(called, [row.numpy().data for row in rows])
        except (OSError, ValueError, msgspec.DecodeError) as error:
            self._close()
            raise CallbackError("cannot be reached", f"{self._path}: {error}") from error
        if answer.error is not None:
            raise CallbackError(f"raised {answer.error}", answer.detail)
        for row, tensor in zip(rows, logits, strict=True):
            if tensor.device.type != "cpu":
                tensor.view(-1).copy_(row)

    def _call(self, called: Sequence[tuple[str, int | None, list[int]]], rows: list[memoryview]) -> Answer:
        deadline = time.monotonic() + self._seconds
        connection = self._connect(deadline)
        call = CallbackCall([connection.sequence(*each) for each in called])
        connection.frames.send(call, rows, deadline)
        self._row_bytes = [row.nbytes for row in rows]
        if not connection.answers(deadline):
            connection.unanswered = True
            raise CallbackError(f"did not answer within {self._seconds:g} s", self._path)
        return connection.receive(rows, deadline)

    def _connect(self, deadline: float) -> _Connection:
        """The connection, without a late answer to an earlier call. Raises CallbackError if that call still runs."""
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
