"""How a rank other than 0 starts, carries out commands and ends."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
import torch

from engine_worker.parallel import follower
from engine_worker.parallel.channel import EXIT_GROUP_LOST
from engine_worker.parallel.commands import CallMethod, Command, Heartbeat, LoadModel, Shutdown, encode
from engine_worker.parallel.follower import Follower
from engine_worker.parallel.rank_env import RankEnv
from sluice.checkpoint.folder import open_checkpoint
from sluice.settings.engine import ProcessorNames
from sluice.wire.calls import MethodCall
from tests.engine_worker.parallel.fake_group import CONFIG


class Commands:
    """A channel with a fixed list of commands."""

    def __init__(self, *commands: Command) -> None:
        self._rest = list(commands)
        self.finished = 0

    def receive(self, _seconds: float) -> bytearray:
        return bytearray(encode(self._rest.pop(0)))

    def complete(self) -> None:
        self.finished += 1


def test_another_rank_also_drops_its_graphs_first(group, folder, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    commands = Commands(
        LoadModel(folder, open_checkpoint(folder).fingerprint, CONFIG, "there:1", 60.0, 60.0), Heartbeat(), Shutdown()
    )
    assert Follower(commands, RankEnv(1, 2, 1, 2), structlog.get_logger()).run() == 0
    assert commands.finished == 2
    assert group.barrier_reached
    assert group.closed


def test_another_rank_opens_the_same_revision(group, folder, monkeypatch):
    downloads = []

    def opened(model, **options):
        downloads.append((model, options))
        return open_checkpoint(folder)

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("engine_worker.parallel.follower.open_checkpoint", opened)
    load = LoadModel("someone/model", open_checkpoint(folder).fingerprint, CONFIG, "there:1", 60.0, 60.0, "v2")
    assert Follower(Commands(load, Shutdown()), RankEnv(1, 2, 1, 2), structlog.get_logger()).run() == 0
    assert downloads == [("someone/model", {"revision": "v2"})]


def test_another_rank_that_lacks_a_processor(group, folder, monkeypatch):
    waited = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(follower.time, "sleep", waited.append)
    names = ProcessorNames({"x": "no_such_module:f"})
    load = LoadModel(folder, open_checkpoint(folder).fingerprint, CONFIG, "there:1", 60.0, 60.0, processors=names)
    with structlog.testing.capture_logs() as logged:
        assert Follower(Commands(load), RankEnv(1, 2, 1, 2), structlog.get_logger()).run() == EXIT_GROUP_LOST
    assert waited == [follower.GRACE_SECONDS]
    assert "logits_processors: x: 'no_such_module:f' cannot be used" in logged[0]["error"]


class MemoryStore(dict):
    """A store in memory."""

    set = dict.__setitem__


def test_another_rank_stores_its_answer_and_continues(group, folder, monkeypatch):
    store = MemoryStore()
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(follower, "connect_store", lambda *_: store)
    commands = Commands(
        LoadModel(folder, open_checkpoint(folder).fingerprint, CONFIG, "there:1", 60.0, 60.0),
        CallMethod(1, MethodCall("ping")),
        CallMethod(2, MethodCall("nothing", ranks=(1,))),
        CallMethod(3, MethodCall("ping", ranks=(0,))),
        Shutdown(),
    )
    assert Follower(commands, RankEnv(1, 2, 1, 2), structlog.get_logger()).run() == 0
    assert commands.finished == 4
    assert store.keys() == {"sluice/call/1/1", "sluice/call/2/1"}
    assert "pid" in store["sluice/call/1/1"]
    assert "there is no method 'nothing'" in store["sluice/call/2/1"]


def test_a_rank_that_cannot_store_its_answer_continues(group, folder, monkeypatch):
    class Gone:
        def set(self, *_):
            raise torch.distributed.DistError("Broken pipe")

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(follower, "connect_store", lambda *_: Gone())
    load = LoadModel(folder, open_checkpoint(folder).fingerprint, CONFIG, "there:1", 60.0, 60.0)
    commands = Commands(load, CallMethod(1, MethodCall("ping")), Shutdown())
    assert Follower(commands, RankEnv(1, 2, 1, 2), structlog.get_logger()).run() == 0


LEAVING = """
import sys, threading
from engine_worker.parallel.follower import exit_now
threading.Thread(target=threading.Event().wait).start()
sys.stdout.write("last words")
exit_now(3)
"""


@pytest.mark.process
def test_a_rank_exits_although_a_thread_is_blocked():
    """Only `exit_now` can end this process, because its other thread never ends."""
    command = [sys.executable, "-c", LEAVING]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (3, "last words")
