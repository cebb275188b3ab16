"""An engine's connection to one keeper."""

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count, islice
from typing import Final, TypeVar

import msgspec
import zmq

from engine_worker.keeper.messages import (
    MAX_BLOCK_BYTES,
    Answer,
    Blocks,
    DropBlocks,
    Dropped,
    FindBlocks,
    FoundBlocks,
    LayoutForm,
    Question,
    ReadBlocks,
    blocks_per_answer,
    body_of,
    encode,
)
from sluice.host.host_names import Endpoint, HostNames
from sluice.lanes.keys import Security
from sluice.lanes.lane import connect, current_keys, end_half_open, is_ipv6

ANSWER_SECONDS: Final = 2.0
"""Timeout of an answer, which may have 8 MB, and of a connection."""
NAME_SECONDS: Final = 0.01
"""Interval at which the address of a host name is looked for while the DNS is asked."""
POLL_SECONDS: Final = 0.05
"""Interval at which a wait looks whether it must end."""
DEPTH: Final = 2
"""Questions for blocks that are asked at a time: the keeper reads while the engine stores."""

Store = Callable[[int, int, memoryview], bool]
"""Called with the index of a block, its sum and its bytes. Returns whether it was whole."""
Until = Callable[[], bool]
"""Returns True once nothing must be awaited any more."""
A = TypeVar("A", bound=Answer)


class AnswerError(Exception):
    """A keeper did not answer in time, or its answer is malformed."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason
        """`timeout` or `malformed`."""

    def __str__(self) -> str:
        return str(self.args[1])


class EndedError(Exception):
    """The asker's time has ended. The keeper has not failed."""


class Link:
    """Not thread-safe. Methods raise AnswerError and EndedError, after which the link must be closed: unread
    answers would count towards the few that the keeper queues for this engine."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        security: Security,
        names: HostNames,
        until: Until,
    ) -> None:
        """Raises ValueError and ZMQError if this address cannot or must not be used, AnswerError if its host's address
        is not known in time, and EndedError."""
        security.check(address)
        endpoint = _resolved(address, names, until)
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        # Not from 0: a keeper might still answer the questions of an engine's former connection.
        self._numbers = count(secrets.randbits(32))
        self._socket = context.socket(zmq.DEALER)
        try:
            self._socket.set(zmq.IPV6, is_ipv6(endpoint))
            end_half_open(self._socket, sends=True)
            self._socket.set(zmq.LINGER, 0)
            self._socket.set(zmq.MAXMSGSIZE, MAX_BLOCK_BYTES)
            # Without a connection, a question is not accepted instead of being queued.
            self._socket.set(zmq.IMMEDIATE, 1)
            connect(self._socket, endpoint, current_keys(security, address))
        except Exception:
            self._socket.close()
            raise

    def find(self, form: LayoutForm, hashes: list[bytes], until: Until) -> int:
        number = next(self._numbers)
        self._send(FindBlocks(number, form, hashes), until)
        found, _ = self._receive(number, FoundBlocks, until)
        if found.count > len(hashes):
            raise AnswerError("malformed", f"{found.count} blocks of {len(hashes)} were found")
        return found.count

    def read(self, form: LayoutForm, digests: Sequence[bytes], store: Store, until: Until) -> None:
        """Read blocks in order, until one is not there or `store` refuses it."""
        size, stored = blocks_per_answer(form.layout), 0
        batches = (list(digests[start : start + size]) for start in range(0, len(digests), size))
        asked = deque(self._ask_to_read(form, batch, until) for batch in islice(batches, DEPTH))
        while asked:
            number, num_asked = asked.popleft()
            blocks, data = self._receive(number, Blocks, until)
            self._check(blocks, data, num_asked, form.layout.block_bytes)
            for total, part in zip(blocks.sums, data, strict=True):
                if not store(stored, total, part):
                    return
                stored += 1
            if len(data) < num_asked:
                return
            asked.extend(self._ask_to_read(form, batch, until) for batch in islice(batches, 1))

    def drop(self, until: Until) -> bool:
        number = next(self._numbers)
        self._send(DropBlocks(number), until)
        dropped, _ = self._receive(number, Dropped, until)
        return dropped.done

    def close(self) -> None:
        self._socket.close()

    def _ask_to_read(self, form: LayoutForm, batch: list[bytes], until: Until) -> tuple[int, int]:
        """The question's number, and how many blocks it asks for."""
        number = next(self._numbers)
        self._send(ReadBlocks(number, form, batch), until)
        return number, len(batch)

    def _send(self, question: Question, until: Until) -> None:
        if not self._ready(zmq.POLLOUT, time.monotonic() + ANSWER_SECONDS, until):
            raise AnswerError("timeout", "there is no connection")
        self._socket.send(encode(question), zmq.NOBLOCK)

    def _receive(self, number: int, kind: type[A], until: Until) -> tuple[A, list[memoryview]]:
        """The answer to the question with this number, and the frames after it."""
        end = time.monotonic() + ANSWER_SECONDS
        while self._ready(zmq.POLLIN, end, until):
            first, *others = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            try:
                answer = self._decoder.decode(body_of(first.buffer))
            except (ValueError, msgspec.MsgspecError, RecursionError) as error:
                raise AnswerError("malformed", str(error)) from error
            # Otherwise an answer to a question whose asker has not waited for it.
            if answer.number == number:
                if not isinstance(answer, kind):
                    raise AnswerError("malformed", f"{type(answer).__name__} in place of {kind.__name__}")
                return answer, [frame.buffer for frame in others]
        raise AnswerError("timeout", f"no answer in {ANSWER_SECONDS:g} s")

    def _ready(self, event: int, end: float, until: Until) -> bool:
        """Wait for the socket. Returns False if it is not ready before `end`."""
        while (left := end - time.monotonic()) > 0:
            if until():
                raise EndedError
            if self._socket.poll(max(1, int(min(left, POLL_SECONDS) * 1000)), event):
                return True
        return False

    def _check(self, blocks: Blocks, data: list[memoryview], asked: int, size: int) -> None:
        if not len(data) == len(blocks.sums) <= asked:
            raise AnswerError("malformed", f"{len(data)} blocks and {len(blocks.sums)} sums for {asked} questions")
        if any(len(part) != size for part in data):
            raise AnswerError("malformed", f"a block that has not {size} bytes")


def _resolved(address: str, names: HostNames, until: Until) -> str:
    """The address with an IP address in place of a host name. Raises AnswerError and EndedError."""
    endpoint, end = Endpoint(address, names), time.monotonic() + ANSWER_SECONDS
    while endpoint.text is None:
        if until():
            raise EndedError
        if time.monotonic() >= end:
            raise AnswerError("timeout", "the host's address is not known")
        time.sleep(NAME_SECONDS)
        endpoint.follow()
    return endpoint.text
