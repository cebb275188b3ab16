"""Answers the questions of engines on other machines."""

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import structlog
import zmq

from engine_worker.keeper.disk import DiskTier
from engine_worker.keeper.memory import MemoryTier, StoredBlock, read_from
from engine_worker.keeper.messages import (
    MAX_QUESTION_BYTES,
    Blocks,
    DropBlocks,
    Dropped,
    FindBlocks,
    FoundBlocks,
    Question,
    ReadBlocks,
    blocks_per_answer,
    body_of,
    encode,
)
from engine_worker.keeper.turns import Reply, Turns
from engine_worker.pool_files.layout import Layout
from engine_worker.pool_files.peer_files import PeerFiles
from sluice.host.limited_log import LimitedLog
from sluice.lanes.keys import Security
from sluice.lanes.listener import Listener, sender_of

ANSWERS: Final = ("found", "missing", "read", "dropped", "not_dropped", "busy", "malformed")
CAPACITY: Final = 4
"""Questions and answers that are stored for each engine: two in progress, and two that ZeroMQ has not accounted for.
Answers beyond it are dropped."""
MAX_QUESTIONS: Final = 64
"""Questions that are answered before the service's other work."""
DISK_THREADS: Final = 2
MAX_NOTES: Final = 64
"""Notes of use that wait for the disk. More are left out: they only choose what is evicted."""


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
        # In threads, because a disk may be slow or hang, and other engines ask for what is in memory.
        self._disk_threads = ThreadPoolExecutor(DISK_THREADS, "disk")
        self._notes = set[Future[None]]()
        self._turns = Turns(self._send)
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
            self._turns.close()
            self._context.term()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._turns.ended, zmq.POLLIN)
        self._poller.register(self._listener.socket, zmq.POLLIN)

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
        self._poller.poll(int(seconds * 1000))
        self._turns.take_ended()
        for _ in range(MAX_QUESTIONS):
            try:
                peer, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            reply = self._reply(peer.bytes, frames)
            if reply is not None:
                self._turns.add(peer.bytes, reply)
        return False

    @property
    def waits(self) -> bool:
        """Whether answers from the disk are still to come."""
        return bool(self._turns)

    def close(self) -> None:
        # Does not wait for the threads: a hung disk may never answer.
        self._disk_threads.shutdown(wait=False, cancel_futures=True)
        self._turns.close()
        self._listener.close()
        self._context.term()

    def _send(self, peer: bytes, reply: Reply) -> None:
        self.answers[reply.kind] += 1
        self.read["memory"] += len(reply.data) - reply.from_disk
        self.read["disk"] += reply.from_disk
        # Dropped if the peer has gone or does not read.
        self._listener.socket.send_multipart([peer, encode(reply.message), *reply.data], zmq.NOBLOCK, copy=False)

    def _reply(self, peer: bytes, frames: "list[zmq.Frame]") -> "Reply | Future[Reply] | None":
        try:
            if len(frames) != 1:
                raise ValueError(f"a question has one frame (got {len(frames)})")
            question = self._decoder.decode(body_of(frames[0].buffer))
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            self.answers["malformed"] += 1
            sender = sender_of(frames[0]) if frames else ""
            self._log.warning("question_rejected", reason=str(error), sender=sender)
            return None
        if self._turns.is_full(peer):
            self.answers["busy"] += 1
            return None
        match question:
            case FindBlocks():
                return self._find(question)
            case ReadBlocks():
                return self._read(question)
            case DropBlocks():
                return self._drop(question)

    def _find(self, question: FindBlocks) -> Reply:
        layout, disk = question.layout.layout, self._disk
        files, count = self._memory.files(layout), 0
        for digest in question.hashes:
            if not any(files.find(digest)) and (disk is None or not disk.has(layout, digest)):
                break
            count += 1
        if disk is not None:
            self._note_use(disk, layout, question.hashes[:count])
        return Reply("found" if count else "missing", FoundBlocks(question.number, count))

    def _note_use(self, disk: DiskTier, layout: Layout, chain: list[bytes]) -> None:
        self._notes = {note for note in self._notes if not note.done()}
        if len(self._notes) < MAX_NOTES:
            self._notes.add(self._disk_threads.submit(disk.use, layout, chain))

    def _read(self, question: ReadBlocks) -> "Reply | Future[Reply]":
        layout, blocks = question.layout.layout, list[StoredBlock]()
        files, hashes = self._memory.files(layout), question.hashes[: blocks_per_answer(layout)]
        for digest in hashes:
            block = read_from(files, digest)
            if block is None:
                if self._disk is not None and not self._turns.disk_is_full and self._disk.has(layout, digest):
                    return self._disk_threads.submit(_read_rest, question, self._disk, files, blocks)
                break
            blocks.append(block)
        return _blocks(question, blocks)

    def _drop(self, question: DropBlocks) -> "Reply | Future[Reply]":
        if self._disk is None or self._turns.disk_is_full:
            return _dropped(question, self._disk is None and not self._disk_failed)
        drop = self._disk.drop
        return self._disk_threads.submit(lambda: _dropped(question, drop()))


def _read_rest(question: ReadBlocks, disk: DiskTier, files: PeerFiles, first: list[StoredBlock]) -> Reply:
    """In a thread: `first`, which are in memory, and what follows them."""
    layout, blocks, from_disk = question.layout.layout, [*first], 0
    for digest in question.hashes[len(first) : blocks_per_answer(layout)]:
        block = read_from(files, digest)
        if block is None:
            block = disk.read(layout, digest)
            from_disk += block is not None
        if block is None:
            break
        blocks.append(block)
    return _blocks(question, blocks, from_disk)


def _blocks(question: ReadBlocks, blocks: list[StoredBlock], from_disk: int = 0) -> Reply:
    totals, data = [block.total for block in blocks], [block.data for block in blocks]
    return Reply("read" if blocks else "missing", Blocks(question.number, totals), data, from_disk)


def _dropped(question: DropBlocks, done: bool) -> Reply:
    return Reply("dropped" if done else "not_dropped", Dropped(question.number, done))
