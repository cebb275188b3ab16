"""Commands through memory that one process writes and several read: a ring of bytes, and a cursor for each of them.

The memory has no name: whoever reads it got its file descriptor from whoever made it, so nothing is left behind however
they end. Cursors count bytes from the beginning and never wrap: what is in the ring for a reader is the writer's minus
its own. A command is its number, its length and its bytes; one that is longer than the ring goes through it in pieces.

A cursor is eight bytes at a multiple of eight, which a 64-bit machine reads and writes at once. Between it and the
bytes that it speaks of there is a fence, on both sides: ARM, for one, lets others see them in another order.
"""

import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from engine_worker.parallel.channel import HEADER, ChannelError, GoneError, Part, take_command
from engine_worker.parallel.wakeup import Bell

CAPACITY = 4 << 20
LINE = 64
"""Bytes of a cache line: processes that write count in lines of their own."""
FULL_SECONDS = 100e-6
"""Between two looks for room."""
HEAD, TAIL, DONE = 0, 0, 1


class Memory:
    """Shared by file descriptor. The first line has the writer's cursor, then comes one for each reader."""

    def __init__(self, descriptor: int, readers: int) -> None:
        """`descriptor` is the caller's to close."""
        self._map = mmap.mmap(descriptor, 0)
        view = memoryview(self._map)
        first = LINE * (1 + readers)
        lines = view[:first].cast("Q")
        size = LINE // lines.itemsize
        self.head, *self.readers = (lines[begin : begin + size] for begin in range(0, len(lines), size))
        self.data = view[first:]

    @staticmethod
    def create(readers: int, capacity: int = CAPACITY) -> int:
        """A file descriptor of zeros, and no file."""
        if sys.platform == "linux":
            descriptor = os.memfd_create("sluice-ring")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, LINE * (1 + readers) + capacity)
        return descriptor


class Fence:
    """What came before it in a thread is over, for all cores, before what comes after it.

    Python has nothing for that, but the kernel has: a byte into a pipe of one's own releases the pipe's lock, and the
    byte out again takes it after that (po-unlock-lock-po in Linux's tools/memory-model). It takes a microsecond.
    """

    def __init__(self) -> None:
        self._out, self._in = os.pipe()

    def __call__(self) -> None:
        """Pass it. For one thread at a time."""
        os.write(self._in, b"\0")
        os.read(self._out, 1)

    def close(self) -> None:
        """Give the pipe back."""
        os.close(self._in)
        os.close(self._out)


class RingWriter:
    """See `Sender`."""

    def __init__(self, memory: Memory, bells: Sequence[Bell], seconds: float) -> None:
        """`bells`: of the readers; `seconds`: in which a full ring must get room."""
        self.sent = 0
        self._memory = memory
        self._bells = bells
        self._seconds = seconds
        self._written = 0
        self._fence = Fence()
        self._sending = threading.Lock()

    def send(self, parts: Sequence[Part]) -> None:
        """See `Sender`."""
        with self._sending:
            size = sum(len(part) for part in parts)
            for part in (HEADER.pack(self.sent + 1, size), *parts):
                self._write(memoryview(part).cast("B"))
            self.sent += 1
            for rank, bell in enumerate(self._bells, 1):
                if not bell.ring():
                    raise GoneError(rank)

    def idle(self) -> bool:
        """See `Sender`."""
        return not self._sending.locked()

    def done(self, rank: int) -> int:
        """See `Sender`."""
        return self._memory.readers[rank - 1][DONE]

    def gone(self, rank: int) -> bool:
        """See `Sender`."""
        return self._bells[rank - 1].gone()

    def close(self) -> None:
        """See `Sender`."""
        for bell in self._bells:
            bell.close()
        self._fence.close()

    def _write(self, part: memoryview) -> None:
        data = self._memory.data
        while part:
            begin = self._written % len(data)
            piece = part[: min(self._room(), len(data) - begin)]
            data[begin : begin + len(piece)] = piece
            self._fence()
            self._written += len(piece)
            self._memory.head[HEAD] = self._written
            part = part[len(piece) :]

    def _room(self) -> int:
        """Bytes that all readers have read; waits until there are any."""
        size, end = len(self._memory.data), time.monotonic() + self._seconds
        while True:
            read = [line[TAIL] for line in self._memory.readers]
            if room := size - self._written + min(read):
                self._fence()
                return room
            if time.monotonic() > end:
                raise ChannelError(f"rank {read.index(min(read)) + 1} has read nothing for {self._seconds:g} s")
            for bell in self._bells:
                bell.ring()
            time.sleep(FULL_SECONDS)


class RingReader:
    """See `Receiver`."""

    def __init__(self, memory: Memory, rank: int, bell: Bell) -> None:
        self._memory = memory
        self._line = memory.readers[rank - 1]
        self._bell = bell
        self._read = 0
        self._received = 0
        self._fence = Fence()

    def receive(self, seconds: float) -> bytearray:
        """See `Receiver`."""
        message = take_command(self._received + 1, lambda size: self._take(size, seconds))
        self._received += 1
        return message

    def fileno(self) -> int:
        """See `Receiver`."""
        return self._bell.fileno()

    def finish(self) -> None:
        """See `Receiver`."""
        self._line[DONE] = self._received

    def close(self) -> None:
        """See `Receiver`."""
        self._bell.close()
        self._fence.close()

    def _take(self, size: int, seconds: float) -> bytearray:
        out, data, filled = bytearray(size), self._memory.data, 0
        while filled < size:
            begin = self._read % len(data)
            count = min(size - filled, self._unread(seconds), len(data) - begin)
            out[filled : filled + count] = data[begin : begin + count]
            self._fence()
            filled += count
            self._read += count
            self._line[TAIL] = self._read
        return out

    def _unread(self, seconds: float) -> int:
        """Bytes that wait to be read; waits until there are any."""
        while True:
            if unread := self._memory.head[HEAD] - self._read:
                self._fence()
                return unread
            try:
                if not self._bell.wait(seconds):
                    raise ChannelError(f"rank 0 has sent nothing for {seconds:g} s")
            except EOFError:
                raise ChannelError("rank 0 has gone") from None
