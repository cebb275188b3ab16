"""Answers the questions of engines on other machines."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog
import zmq

from engine_worker.keeper.disk import DiskTier
from engine_worker.keeper.memory import MemoryTier, StoredBlock, read_from
from engine_worker.keeper.messages import (
    ANSWER_BYTES,
    MAX_QUESTION_BYTES,
    Blocks,
    DropBlocks,
    Dropped,
    FindBlocks,
    FoundBlocks,
    Question,
    ReadBlocks,
    body_of,
    encode,
)
from engine_worker.pool_files.layout import Layout
from sluice.host.limited_log import LimitedLog
from sluice.lanes.keys import Security
from sluice.lanes.listener import Listener, sender_of
from sluice.wire.message import Message

ANSWERS: Final = ("found", "missing", "read", "dropped", "not_dropped", "malformed")
CAPACITY: Final = 4
"""Questions and answers that are stored for each engine: two in progress, and two that ZeroMQ has not accounted for.
Answers beyond it are dropped."""
MAX_QUESTIONS: Final = 64
"""Questions that are answered before the service's other work."""


class Reply(NamedTuple):
    message: Message
    data: Sequence[memoryview] = ()
    """Frames after the message."""


class Keeper:
    """Not thread-safe."""

    def __init__(
        self, address: str, security: Security, folder: Path, disk: DiskTier | None, disk_failed: bool = False
    ) -> None:
        """`folder`: the engines' `kv_folder`. `disk_failed`: there is a disk, but its blocks can be neither read nor
        dropped. Raises as `Listener`."""
        self.answers: Counter[str] = Counter(dict.fromkeys(ANSWERS, 0))
        """Questions by answer. All keys are there from the start: another thread reads it."""
        self.read: Counter[str] = Counter(memory=0, disk=0)
        """Blocks that were handed out, by tier."""
        self._memory = MemoryTier(folder)
        self._disk = disk
        self._disk_failed = disk_failed
        self._decoder: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
        self._log = LimitedLog(structlog.get_logger())
        # Its own, because only one listener of a context can have keys.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._listener = Listener(
                self._context,
                zmq.ROUTER,
                address,
                security,
                capacity=CAPACITY,
                max_frame_bytes=MAX_QUESTION_BYTES,
                sends=True,
            )
        except Exception:
            self._context.term()
            raise

    @property
    def address(self) -> str:
        """Where it listens, without placeholders."""
        return self._listener.address

    @property
    def refused(self) -> int:
        """Number of connections that were refused because their key is not admitted."""
        return self._listener.refused

    def serve(self, seconds: float) -> bool:
        """Wait for questions at most this long, and answer those that have arrived. Returns False if there may be
        more."""
        self._listener.renew()
        socket = self._listener.socket
        if not socket.poll(int(seconds * 1000), zmq.POLLIN):
            return True
        for _ in range(MAX_QUESTIONS):
            try:
                peer, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            reply = self._reply(frames)
            if reply is not None:
                # Dropped if the peer has gone or does not read.
                socket.send_multipart([peer.bytes, encode(reply.message), *reply.data], zmq.NOBLOCK, copy=False)
        return False

    def close(self) -> None:
        self._listener.close()
        self._context.term()

    def _reply(self, frames: "list[zmq.Frame]") -> Reply | None:
        try:
            if len(frames) != 1:
                raise ValueError(f"a question has one frame (got {len(frames)})")
            question = self._decoder.decode(body_of(frames[0].buffer))
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            self.answers["malformed"] += 1
            sender = sender_of(frames[0]) if frames else ""
            self._log.warning("question_rejected", reason=str(error), sender=sender)
            return None
        match question:
            case FindBlocks():
                return self._find(question)
            case ReadBlocks():
                return self._read(question)
            case DropBlocks():
                return self._drop(question)

    def _find(self, question: FindBlocks) -> Reply:
        has, count = self._has(question.layout.layout), 0
        while count < len(question.hashes) and has(question.hashes[count]):
            count += 1
        if self._disk is not None:
            self._disk.use(question.layout.layout, question.hashes[:count])
        self.answers["found" if count else "missing"] += 1
        return Reply(FoundBlocks(question.number, count))

    def _has(self, layout: Layout) -> Callable[[bytes], bool]:
        files, disk = self._memory.files(layout), self._disk
        return lambda digest: any(files.find(digest)) or (disk is not None and disk.has(layout, digest))

    def _read(self, question: ReadBlocks) -> Reply:
        layout, blocks, size = question.layout.layout, list[StoredBlock](), 0
        files = self._memory.files(layout)
        for digest in question.hashes:
            tier, block = "memory", read_from(files, digest)
            if block is None and self._disk is not None:
                tier, block = "disk", self._disk.read(layout, digest)
            size += layout.block_bytes
            if block is None or (blocks and size > ANSWER_BYTES):
                break
            self.read[tier] += 1
            blocks.append(block)
        self.answers["read" if blocks else "missing"] += 1
        return Reply(Blocks(question.number, [block.total for block in blocks]), [block.data for block in blocks])

    def _drop(self, question: DropBlocks) -> Reply:
        done = not self._disk_failed if self._disk is None else self._disk.drop()
        self.answers["dropped" if done else "not_dropped"] += 1
        return Reply(Dropped(question.number, done))
