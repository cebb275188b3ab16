"""Keepers in a thread, and ones that answer as a test wants."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq

from engine_worker.keeper.disk import DiskTier
from engine_worker.keeper.memory import StoredBlock
from engine_worker.keeper.messages import Question, body_of, encode
from engine_worker.keeper.server import Keeper
from engine_worker.pool_files.pool_file import block_sum, word_of
from sluice.lanes.keys import PLAIN, Security
from sluice.wire.message import Message
from tests.engine_worker.pool_files.files import LAYOUT, digest, pattern

DISK_BYTES = 1 << 30


def stored(number: int) -> StoredBlock:
    """Content `number` in one piece."""
    parts = [pattern(number, part) for part in range(len(LAYOUT.parts))]
    words = (part.view(word_of(len(part))) for part in parts)
    return StoredBlock(block_sum(words), memoryview(b"".join(part.tobytes() for part in parts)))


def digests(numbers: Sequence[int]) -> list[bytes]:
    return [digest(number) for number in numbers]


class Threaded:
    """Calls `step` in a thread, from the start to the end of the context."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._step()


class RunningKeeper(Threaded):
    def __init__(self, folder: Path, disk: Path | None = None, address: str = "", security: Security = PLAIN) -> None:
        self.disk = None if disk is None else DiskTier(disk, DISK_BYTES)
        self.keeper = Keeper(address or f"ipc://{folder}/keeper", security, folder, self.disk)
        self.address = self.keeper.address
        super().__init__(lambda: self.keeper.serve(0.01))

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        self.keeper.close()
        if self.disk is not None:
            self.disk.close()


Frames = list[bytes | memoryview]


class ScriptedKeeper(Threaded):
    """Answers each question with what `answer` returns: the frames of any number of answers."""

    def __init__(self, folder: Path, answer: Callable[[Question], list[Frames]]) -> None:
        self.address = f"ipc://{folder}/scripted"
        self.questions: list[Question] = []
        self._answer = answer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(self.address)
        super().__init__(self._serve)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        self._socket.close()
        self._context.term()

    def _serve(self) -> None:
        if self._socket.poll(10):
            peer, frame = self._socket.recv_multipart()
            self.questions.append(msgspec.msgpack.decode(body_of(frame), type=Question))
            for frames in self._answer(self.questions[-1]):
                self._socket.send_multipart([peer, *frames])


def frames(message: Message, data: Sequence[bytes | memoryview] = ()) -> Frames:
    return [encode(message), *data]
