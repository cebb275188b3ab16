"""Both ends of a command channel in this process."""

import os
import socket

from engine_worker.parallel.shm_channel import Memory, RingReader, RingWriter
from engine_worker.parallel.tcp import Listener, TcpSender, connect
from engine_worker.parallel.wakeup import Bell

SECONDS = 20.0


def ring(readers: int = 1, capacity: int = 1 << 16, seconds: float = SECONDS) -> tuple[RingWriter, list[RingReader]]:
    descriptor = Memory.create(readers, capacity)
    pairs = [socket.socketpair() for _ in range(readers)]
    # Two mappings of the same memory, as in two processes.
    writer = RingWriter(Memory(descriptor, readers), [Bell(ours) for ours, _ in pairs], seconds)
    found = [RingReader(Memory(descriptor, readers), rank, Bell(theirs)) for rank, (_, theirs) in enumerate(pairs, 1)]
    os.close(descriptor)
    return writer, found


def tcp(readers: int = 1, capacity: int = 0, seconds: float = SECONDS) -> tuple[TcpSender, list]:
    listener = Listener("127.0.0.1")
    found = [connect(listener.invitation, rank, SECONDS) for rank in range(1, readers + 1)]
    return TcpSender(listener.accept(readers + 1, SECONDS), seconds), found


CHANNELS = {"ring": ring, "tcp": tcp}


def close(writer, readers) -> None:
    writer.close()
    for reader in readers:
        reader.close()
