"""Both ends of a command channel in this process."""

import os
import socket

from engine_worker.parallel.shm_channel import SharedMemory, ShmReceiver, ShmSender, Wakeup
from engine_worker.parallel.tcp import RankListener, TcpSender, connect

SECONDS = 60.0


def ring(readers: int = 1, capacity: int = 1 << 16, seconds: float = SECONDS) -> tuple[ShmSender, list[ShmReceiver]]:
    descriptor = SharedMemory.create(readers, capacity)
    pairs = [socket.socketpair() for _ in range(readers)]
    # Two mappings of the same memory, as in two processes.
    writer = ShmSender(SharedMemory(descriptor, readers), [Wakeup(writer_end) for writer_end, _ in pairs], seconds)
    receivers = [
        ShmReceiver(SharedMemory(descriptor, readers), rank, Wakeup(reader_end))
        for rank, (_, reader_end) in enumerate(pairs, 1)
    ]
    os.close(descriptor)
    return writer, receivers


def tcp(readers: int = 1, capacity: int = 0, seconds: float = SECONDS) -> tuple[TcpSender, list]:
    listener = RankListener("127.0.0.1")
    receivers = [connect(listener.endpoint, rank, SECONDS) for rank in range(1, readers + 1)]
    return TcpSender(listener.accept(readers + 1, SECONDS), seconds), receivers


CHANNELS = {"ring": ring, "tcp": tcp}


def close(writer, readers) -> None:
    writer.close()
    for reader in readers:
        reader.close()
