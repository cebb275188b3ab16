"""Channels deliver commands of any size in order, whether the sender or a receiver is slow."""

import os
import random
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine_worker.parallel import tcp
from engine_worker.parallel.channel import ChannelError
from engine_worker.parallel.shm_channel import SharedMemory, ShmSender, Wakeup
from engine_worker.parallel.tcp import RankListener, TcpSender, connect
from tests.engine_worker.parallel.channels import CHANNELS, SECONDS, close, ring
from tests.examples import examples

pytestmark = pytest.mark.slow

SIZES = st.lists(st.integers(0, 300), max_size=30)


@pytest.fixture(params=CHANNELS)
def channel(request):
    return CHANNELS[request.param]


def messages(seed: int, sizes: list[int]) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(size) for size in sizes]


def write(writer, sent: list[bytes]) -> None:
    for message in sent:
        writer.send(message)


def read(reader, count: int, naps: random.Random | None = None) -> list[bytes]:
    messages = []
    for _ in range(count):
        if naps is not None and naps.random() < 0.2:
            time.sleep(naps.random() * 2e-3)
        messages.append(bytes(reader.receive(SECONDS)))
        reader.complete()
    return messages


@examples(40)
@given(sizes=SIZES, capacity=st.integers(5, 200), readers=st.integers(1, 3), seed=st.integers(0, 99))
@example(sizes=[1, 0, 70], capacity=1, readers=2, seed=0)
def test_order_wrap_around_and_splitting(sizes, capacity, readers, seed):
    """Every reader gets every command unchanged, through a ring that is smaller than most commands."""
    sent = messages(seed, sizes)
    writer, receivers = ring(readers, capacity)
    with ThreadPoolExecutor(readers + 1) as pool:
        writing = pool.submit(write, writer, sent)
        reading = [pool.submit(read, each, len(sent), random.Random(seed + i)) for i, each in enumerate(receivers)]
        writing.result(60)
        assert [each.result(60) for each in reading] == [sent] * readers
    assert writer.sent == len(sent)
    assert [writer.completed(rank + 1) for rank in range(readers)] == [len(sent)] * readers
    close(writer, receivers)


@examples(20)
@given(sizes=st.lists(SIZES, min_size=2, max_size=2), seed=st.integers(0, 99))
def test_two_rings_at_the_same_time(sizes, seed):
    """Commands in one ring do not affect those in the other."""
    sent = [messages(seed + i, each) for i, each in enumerate(sizes)]
    pairs = [ring(1, 50), ring(1, 50)]
    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write, writer, each) for (writer, _), each in zip(pairs, sent, strict=True)]
        reading = [pool.submit(read, readers[0], len(each)) for (_, readers), each in zip(pairs, sent, strict=True)]
        for each in writing:
            each.result(60)
        assert [each.result(60) for each in reading] == sent
    for writer, readers in pairs:
        close(writer, readers)


@examples(20)
@given(sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=20), data=st.data())
def test_commands_wait_in_the_ring(sizes, data):
    """Commands that are read late and together are not lost, and none completes early. All in one thread."""
    sent = messages(0, sizes)
    writer, (reader,) = ring(1, 1 << 17)
    due = 0
    for i, message in enumerate(sent):
        writer.send(message)
        if data.draw(st.booleans()):
            assert read(reader, i + 1 - due) == sent[due : i + 1]
            due = i + 1
        assert writer.completed(1) == due
    assert read(reader, len(sent) - due) == sent[due:]
    close(writer, [reader])


def test_a_long_command(channel):
    writer, readers = channel(2)
    sent = messages(3, [5 << 20, 1, 3 << 20])
    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(read, reader, 3) for reader in readers]
        write(writer, sent)
        assert [each.result(60) for each in reading] == [sent, sent]
    close(writer, readers)


def test_threads_that_send_concurrently_do_not_interleave(channel):
    writer, (reader,) = channel(1)
    with ThreadPoolExecutor(5) as pool:
        sending = [
            pool.submit(lambda name=name: [writer.send(bytes([name]) * 3000 + bytes([i])) for i in range(20)])
            for name in range(4)
        ]
        messages = pool.submit(read, reader, 80).result(60)
        for each in sending:
            each.result(60)
    assert all(message[:3000] == message[:1] * 3000 for message in messages)
    for name in range(4):
        assert [message[-1] for message in messages if message[0] == name] == list(range(20))
    close(writer, [reader])


def test_completed_commands_are_counted(channel):
    writer, readers = channel(2)
    for _ in range(3):
        writer.send(b"x")
    for _ in range(2):
        readers[1].receive(SECONDS)
        readers[1].complete()
    readers[0].receive(SECONDS)
    end = time.monotonic() + SECONDS
    while writer.completed(2) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert (writer.sent, writer.completed(1), writer.completed(2)) == (3, 0, 2)
    close(writer, readers)


def test_a_reader_that_reads_nothing_blocks_the_writer_for_a_bounded_time(channel):
    writer, readers = channel(2, 1000, seconds=5.0)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(readers[0].receive, SECONDS)
        with pytest.raises(ChannelError, match="rank 2"):
            writer.send(bytes(50 << 20))
        close(writer, readers[1:])
        reading.exception(60)
    readers[0].close()


def test_silence_is_bounded(channel):
    writer, readers = channel(1)
    with pytest.raises(ChannelError, match=r"nothing for 0\.6 s"):
        readers[0].receive(0.6)
    close(writer, readers)


def test_the_other_end_has_disconnected(channel):
    writer, readers = channel(2)
    writer.send(b"last words")
    assert not writer.disconnected(1)
    readers[1].close()
    end = time.monotonic() + SECONDS
    while not writer.disconnected(2) and time.monotonic() < end:
        time.sleep(0.01)
    assert (writer.disconnected(1), writer.disconnected(2)) == (False, True)
    with pytest.raises(ChannelError, match="rank 2"):  # noqa: PT012 - TCP may accept commands before it notices
        for _ in range(100):
            writer.send(b"x")
            time.sleep(0.01)
    writer.close()
    assert readers[0].receive(SECONDS) == b"last words"
    with pytest.raises(ChannelError, match="rank 0 has disconnected"):  # noqa: PT012
        for _ in range(1000):
            readers[0].receive(SECONDS)
    readers[0].close()


def test_a_command_with_an_unexpected_number_is_an_error():
    writer, (reader,) = ring(1)
    writer.sent = 4
    writer.send(b"x")
    with pytest.raises(ChannelError, match="received command 5 instead of 1"):
        reader.receive(SECONDS)
    close(writer, [reader])


def test_a_waiting_reader_is_woken_immediately():
    """A reader waits in slices, but a command wakes it before the end of a slice."""
    writer, (reader,) = ring(1)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):
            reading = pool.submit(reader.receive, SECONDS)
            time.sleep(0.01)
            writer.send(b"x")
            assert reading.result(SECONDS) == b"x"
    close(writer, [reader])


def test_unauthorized_peers_are_disconnected():
    listener = RankListener("127.0.0.1")
    token, port, host = listener.endpoint.split(" ")
    strangers = [socket.create_connection((host, int(port))) for _ in range(4)]
    strangers[0].sendall(bytes(16) + struct.pack("!I", 1))
    strangers[1].sendall(bytes.fromhex(token) + struct.pack("!I", 0))
    strangers[2].sendall(bytes.fromhex(token) + struct.pack("!I", 9))
    strangers[3].close()
    reader = connect(listener.endpoint, 1, SECONDS)
    sender = TcpSender(listener.accept(2, SECONDS), SECONDS)
    sender.send(b"for one")
    assert reader.receive(SECONDS) == b"for one"
    for stranger in strangers[:3]:
        stranger.settimeout(SECONDS)
        assert stranger.recv(1) == b""
        stranger.close()
    close(sender, [reader])


def test_silent_peers_do_not_delay_ranks():
    """A rank whose handshake arrives in two parts does not delay other ranks either."""
    listener = RankListener("127.0.0.1")
    token, port, host = listener.endpoint.split(" ")
    slow = socket.create_connection((host, int(port)))
    handshake = bytes.fromhex(token) + struct.pack("!I", 1)
    slow.sendall(handshake[:7])
    silent = [socket.create_connection((host, int(port))) for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept, 3, SECONDS)
        reader = connect(listener.endpoint, 2, SECONDS)
        time.sleep(0.3)
        slow.sendall(handshake[7:])
        sender = TcpSender(accepting.result(60), SECONDS)
    sender.send(b"for both")
    assert reader.receive(SECONDS) == b"for both"
    assert slow.recv(100).endswith(b"for both")
    for stranger in silent:
        stranger.settimeout(SECONDS)
        assert stranger.recv(1) == b""
        stranger.close()
    slow.close()
    close(sender, [reader])


def test_the_number_of_silent_peers_is_limited(monkeypatch):
    """The oldest of many silent peers are disconnected while the last rank is still awaited."""
    monkeypatch.setattr(tcp, "MAX_PENDING", 3)
    listener = RankListener("127.0.0.1")
    _, port, host = listener.endpoint.split(" ")
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept, 2, SECONDS)
        silent = [socket.create_connection((host, int(port)), SECONDS) for _ in range(5)]
        assert [stranger.recv(1) for stranger in silent[:2]] == [b"", b""]
        assert not accepting.done()
        reader = connect(listener.endpoint, 1, SECONDS)
        sender = TcpSender(accepting.result(60), SECONDS)
    for stranger in silent:
        stranger.close()
    close(sender, [reader])


def test_ranks_that_do_not_connect_are_named():
    listener = RankListener("127.0.0.1")
    _, port, host = listener.endpoint.split(" ")
    reader = connect(listener.endpoint, 2, SECONDS)
    with (
        socket.create_connection((host, int(port))),
        pytest.raises(ChannelError, match=r"ranks \[1, 3\] have not connected"),
    ):
        listener.accept(4, 3.0)
    reader.close()


READER = """
import socket, sys
from engine_worker.parallel.shm_channel import SharedMemory, ShmReceiver, Wakeup
memory, wakeup = map(int, sys.argv[1:])
reader = ShmReceiver(SharedMemory(memory, 1), 1, Wakeup(socket.socket(fileno=wakeup)))
for i in range(500):
    message = reader.receive(60)
    assert message == bytes([i % 251]) * len(message), i
    reader.complete()
sys.exit(len(message) % 100)
"""


def test_from_process_to_process():
    descriptor = SharedMemory.create(1, 3001)
    writer_end, reader_end = socket.socketpair()
    command = [sys.executable, "-c", READER, str(descriptor), str(reader_end.fileno())]
    process = subprocess.Popen(command, pass_fds=(descriptor, reader_end.fileno()), cwd=Path(__file__).parents[3])
    reader_end.close()
    writer = ShmSender(SharedMemory(descriptor, 1), [Wakeup(writer_end)], SECONDS)
    for i in range(500):
        writer.send(bytes([i % 251]) * (i * 37 % 9000))
    assert process.wait(60) == 499 * 37 % 9000 % 100
    assert writer.completed(1) == 500
    assert writer.disconnected(1)
    writer.close()
    os.close(descriptor)
