"""The exclusive right to listen at the path of an ipc socket."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

from sluice.host.socket_file import ListenError, SocketFile
from sluice.lanes.inbox import Inbox
from sluice.lanes.keys import Security
from sluice.lanes.lane import Lane
from sluice.wire.heartbeats import KeepAlive
from sluice.wire.requests import ToDetokenizer
from tests.fakes.lanes import connected, until

KEEP_ALIVE = KeepAlive("engine", 1)
HOLD = """
import sys, time, zmq
from sluice.lanes.inbox import Inbox
from sluice.wire.requests import ToDetokenizer
inbox = Inbox(zmq.Context(), sys.argv[1], ToDetokenizer)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "inbox"


@pytest.fixture
def other(path):
    """Another process that listens at the path."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, f"ipc://{path}"], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.wait()


def inbox_at(context, path: Path | str) -> Inbox:
    return Inbox(context, f"ipc://{path}", ToDetokenizer)


def arrives(context, inbox: Inbox) -> bool:
    lane = connected(Lane(context, inbox.address))
    try:
        return lane.send(KEEP_ALIVE) and inbox.wait(60) and inbox.receive() == [KEEP_ALIVE]
    finally:
        lane.close()


@pytest.mark.process
def test_a_path_where_another_process_listens_is_refused_and_not_changed(context, path, other):
    before = path.stat()
    with pytest.raises(ListenError, match=rf"^cannot listen on ipc://{path}: process {other.pid} listens there$"):
        inbox_at(context, path)
    assert path.stat().st_ino == before.st_ino
    connected(Lane(context, f"ipc://{path}")).close()


def test_two_inboxes_of_one_process_cannot_share_a_path(context, path):
    first = inbox_at(context, path)
    with pytest.raises(ListenError, match=f"process {os.getpid()} listens there"):
        inbox_at(context, path)
    assert arrives(context, first)
    first.close()


@pytest.mark.process
def test_files_of_a_killed_process_are_replaced(context, path, other):
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert path.exists()
    inbox = inbox_at(context, path)
    assert arrives(context, inbox)
    inbox.close()
    assert list(path.parent.iterdir()) == []


def test_a_relative_path(context, path, monkeypatch):
    monkeypatch.chdir(path.parent)
    inbox = inbox_at(context, "inbox")
    with pytest.raises(ListenError, match="listens there"):
        inbox_at(context, path)
    assert arrives(context, inbox)
    inbox.close()
    assert list(path.parent.iterdir()) == []


def test_an_abstract_address(context, path):
    security = Security(insecure=True)
    address = f"ipc://@sluice-{os.getpid()}-{path.parent.name}"
    inbox = Inbox(context, address, ToDetokenizer, security=security)
    with pytest.raises(ListenError, match="another process listens there"):
        Inbox(context, address, ToDetokenizer, security=security)
    inbox.close()


def test_a_port_in_use(context):
    security = Security(insecure=True)
    inbox = Inbox(context, "tcp://127.0.0.1:*", ToDetokenizer, security=security)
    with pytest.raises(ListenError, match=f"^cannot listen on {inbox.address}: another process listens there$"):
        Inbox(context, inbox.address, ToDetokenizer, security=security)
    inbox.close()


def test_an_inbox_does_not_remove_the_socket_of_another(context, path):
    """The inbox's file and lock file were removed, and another inbox uses the path now."""
    first = inbox_at(context, path)
    path.unlink()
    path.with_name("inbox.lock").unlink()
    second = inbox_at(context, path)
    first.close()
    assert arrives(context, second)
    with pytest.raises(ListenError):
        inbox_at(context, path)
    second.close()
    assert list(path.parent.iterdir()) == []


def test_the_socket_of_a_program_without_a_lock_is_not_replaced(context, path):
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(path))
        foreign.listen()
        with pytest.raises(ListenError, match="another process listens there"):
            inbox_at(context, path)
    inbox = inbox_at(context, path)
    assert arrives(context, inbox)
    inbox.close()


def test_a_file_that_is_not_a_socket_is_not_replaced(context, path):
    path.write_text("a user's")
    with pytest.raises(ListenError, match="the file there is not a socket"):
        inbox_at(context, path)
    assert path.read_text() == "a user's"
    assert list(path.parent.iterdir()) == [path]


def test_a_path_that_is_too_long_is_refused(context, path):
    with pytest.raises(ListenError, match="too long"):
        inbox_at(context, path.parent / ("x" * 120))
    assert list(path.parent.iterdir()) == []


def test_only_one_process_at_a_time_owns_a_path(path):
    """Lock files are removed and created while other processes open them."""
    owners, concurrent = [0], [0]
    guard = threading.Lock()

    def work() -> None:
        times_owned = 0
        while times_owned < 50:
            try:
                file = SocketFile(path)
            except ListenError:
                continue
            with guard:
                owners[0] += 1
                concurrent[0] = max(concurrent[0], owners[0])
            time.sleep(0.0005)
            with guard:
                owners[0] -= 1
            file.close()
            times_owned += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert concurrent[0] == 1
    assert not path.with_name("inbox.lock").exists()


def test_a_lock_on_a_removed_file_is_not_used(path, monkeypatch):
    """The former owner removes the file between its opening and the lock on it."""
    removed = []

    def flock(file, operation):
        if not removed:
            removed.append(path.with_name("inbox.lock").unlink())
        real(file, operation)

    real = fcntl.flock
    monkeypatch.setattr("sluice.host.socket_file.fcntl.flock", flock)
    file = SocketFile(path)
    with pytest.raises(ListenError, match="listens there"):
        SocketFile(path)
    file.close()


def test_an_inbox_that_closes_late_does_not_close_its_successor(context, path):
    for _ in range(20):
        inbox = inbox_at(context, path)
        assert arrives(context, inbox)
        inbox.close()
    successor = inbox_at(context, path)
    inbox.close()
    assert arrives(context, successor)
    successor.close()
    until(lambda: list(path.parent.iterdir()) == [])
