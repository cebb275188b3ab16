"""Commands through shared memory, for ranks on one machine: a ring buffer with one writer and several readers.

The memory has no name. Readers inherit its file descriptor, so it is freed however the processes end. A cursor counts
bytes from the start and never wraps: the number of unread bytes is the writer's cursor minus the reader's. A command is
its header and its bytes; a command that is longer than the ring passes through it in pieces.

A cursor is an aligned 8-byte word, which a 64-bit machine reads and writes atomically. Between a cursor and the bytes
that it publishes both sides need a fence, since some CPUs, such as ARM, may reorder the accesses. A byte over a socket
pair wakes a waiting reader, and the socket's hang-up shows that a process has ended.
"""

import mmap
import os
import select
import socket
import sys
import tempfile
import time
from collections.abc import Sequence

from engine_worker.parallel.channel import SLICE_SECONDS, ChannelError, ChannelReceiver, ChannelSender, RankGoneError

CAPACITY = 4 << 20
LINE = 64
"""Bytes of a cache line. Each process writes to a separate line, to avoid false sharing."""
FULL_SECONDS = 100e-6
"""Poll interval of the writer while the ring is full."""
HEAD, TAIL, COMPLETED = 0, 0, 1
"""Words within a cache line."""
DRAIN_BYTES = 4096


class Wakeup:
    """One end of a socket pair that wakes the process at the other end. Several unread wake-ups count as one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setblocking(False)

    def wake(self) -> bool:
        """False if the other end has disconnected."""
        try:
            self._socket.send(b"\0")
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait until woken; False after `seconds`. Raises EOFError if the other end has disconnected."""
        while seconds > 0:
            before = time.monotonic()
            if select.select([self._socket], [], [], min(seconds, SLICE_SECONDS))[0]:
                return self._drain()
            seconds -= min(time.monotonic() - before, SLICE_SECONDS)
        return False

    def disconnected(self) -> bool:
        """Whether the other end has disconnected. Discards pending wake-ups."""
        try:
            return bool(select.select([self._socket], [], [], 0)[0]) and not self._drain()
        except EOFError:
            return True

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _drain(self) -> bool:
        try:
            if not self._socket.recv(DRAIN_BYTES):
                raise EOFError
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise EOFError from error
        return True


class SharedMemory:
    """The ring: a cache line with the writer's cursor, one for each reader, then the bytes."""

    def __init__(self, descriptor: int, readers: int) -> None:
        """Maps the memory. The caller still has to close `descriptor`."""
        self._map = mmap.mmap(descriptor, 0)
        view = memoryview(self._map)
        first = LINE * (1 + readers)
        lines = view[:first].cast("Q")
        size = LINE // lines.itemsize
        self.head, *self.readers = (lines[begin : begin + size] for begin in range(0, len(lines), size))
        self.data = view[first:]

    @staticmethod
    def create(readers: int, capacity: int = CAPACITY) -> int:
        """Create zeroed memory without a name, and return its file descriptor."""
        if sys.platform == "linux":
            descriptor = os.memfd_create("sluice-ring")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, LINE * (1 + readers) + capacity)
        return descriptor


class Fence:
    """A full memory barrier, which Python lacks, in about a microsecond.

    Writing a byte to a private pipe releases the pipe's lock, and reading it acquires the lock again, which orders all
    earlier memory accesses before all later ones (po-unlock-lock-po in Linux's tools/memory-model).
    """

    def __init__(self) -> None:
        self._out, self._in = os.pipe()

    def __call__(self) -> None:
        """Not thread-safe."""
        os.write(self._in, b"\0")
        os.read(self._out, 1)

    def close(self) -> None:
        os.close(self._in)
        os.close(self._out)


class ShmSender(ChannelSender):
    def __init__(self, memory: SharedMemory, wakeups: Sequence[Wakeup], seconds: float) -> None:
        """`wakeups`: one per reader, by rank. `seconds`: time limit for readers to make room in a full ring."""
        super().__init__()
        self._memory = memory
        self._wakeups = wakeups
        self._seconds = seconds
        self._written = 0
        self._fence = Fence()

    def _send(self, header: bytes, message: bytes) -> None:
        self._write(memoryview(header))
        self._write(memoryview(message))
        for rank, wakeup in enumerate(self._wakeups, 1):
            if not wakeup.wake():
                raise RankGoneError(rank)

    def completed(self, rank: int) -> int:
        return self._memory.readers[rank - 1][COMPLETED]

    def disconnected(self, rank: int) -> bool:
        return self._wakeups[rank - 1].disconnected()

    def close(self) -> None:
        for wakeup in self._wakeups:
            wakeup.close()
        self._fence.close()

    def _write(self, rest: memoryview) -> None:
        data = self._memory.data
        while rest:
            begin = self._written % len(data)
            piece = rest[: min(self._room(), len(data) - begin)]
            data[begin : begin + len(piece)] = piece
            # The bytes must be visible before the cursor that publishes them.
            self._fence()
            self._written += len(piece)
            self._memory.head[HEAD] = self._written
            rest = rest[len(piece) :]

    def _room(self) -> int:
        """Wait until at least one byte is free, and return the number of free bytes."""
        size, end = len(self._memory.data), time.monotonic() + self._seconds
        while True:
            read = [line[TAIL] for line in self._memory.readers]
            if room := size - self._written + min(read):
                # The readers' cursors must be read before their bytes are overwritten.
                self._fence()
                return room
            if time.monotonic() > end:
                raise ChannelError(f"rank {read.index(min(read)) + 1} has read nothing for {self._seconds:g} s")
            # `send` wakes readers at the end of a command, but a command longer than the ring must be read before that.
            for wakeup in self._wakeups:
                wakeup.wake()
            time.sleep(FULL_SECONDS)


class ShmReceiver(ChannelReceiver):
    def __init__(self, memory: SharedMemory, rank: int, wakeup: Wakeup) -> None:
        self._memory = memory
        self._line = memory.readers[rank - 1]
        self._wakeup = wakeup
        self._read = 0
        self._fence = Fence()

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def complete(self) -> None:
        self._line[COMPLETED] = self._received

    def close(self) -> None:
        self._wakeup.close()
        self._fence.close()

    def _read_bytes(self, size: int, seconds: float) -> bytearray:
        out, data, filled = bytearray(size), self._memory.data, 0
        while filled < size:
            begin = self._read % len(data)
            count = min(size - filled, self._wait_unread(seconds), len(data) - begin)
            out[filled : filled + count] = data[begin : begin + count]
            # The bytes must be read before the cursor allows the writer to overwrite them.
            self._fence()
            filled += count
            self._read += count
            self._line[TAIL] = self._read
        return out

    def _wait_unread(self, seconds: float) -> int:
        """Wait until at least one byte is unread, and return the number of unread bytes."""
        while True:
            if unread := self._memory.head[HEAD] - self._read:
                # The cursor must be read before the bytes that it publishes.
                self._fence()
                return unread
            try:
                if not self._wakeup.wait(seconds):
                    raise ChannelError(f"rank 0 has sent nothing for {seconds:g} s")
            except EOFError:
                raise ChannelError("rank 0 has disconnected") from None
