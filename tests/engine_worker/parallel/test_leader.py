"""How a group starts and ends, on rank 0 and on another rank, with fake processes, group and graphs."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import structlog
import torch

from engine_worker.attention.choice import ChosenBackend
from engine_worker.layers.shard import Shard
from engine_worker.parallel import follower, leader
from engine_worker.parallel.channel import EXIT_GROUP_LOST
from engine_worker.parallel.commands import CallMethod, Command, Heartbeat, LoadModel, Shutdown, encode
from engine_worker.parallel.follower import Follower
from engine_worker.parallel.leader import Leader
from engine_worker.parallel.rank_env import RankEnv
from engine_worker.runner import load
from engine_worker.runner.config import RunnerConfig
from engine_worker.step import Slice, Step
from sluice.ring.calls import MethodCall
from sluice.ring.checkpoint import open_checkpoint
from sluice.settings.engine import ProcessorNames
from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint
from tests.fakes.command_sender import CommandSender
from tests.fakes.graphs import WeakCapture
from tests.fakes.paged_attention import PagedTorch
from tests.fakes.processes import wait_until

CONFIG = RunnerConfig("cpu", tokens_per_block=4, kv_cache_tokens=64, max_batch_size=2, overlap=True)
STEP = Step((Slice([1, 2], 0, [0], ()),))


def ignore(_done: int, _total: int) -> None:
    """Drop a progress report."""


class FakeProcesses:
    """Ranks that complete every command immediately; records how they were ended."""

    def __init__(self, size: int, _seconds: float, log_level: str) -> None:
        self.sender = CommandSender(size)
        self.sender.keeps_up = True
        self.log_level = log_level
        self.patience: float | None = None
        """Time limit in seconds for which `end` was called."""
        self.killed = False

    def exit_reason(self, _rank: int) -> None:
        return None

    def end(self, seconds: float) -> None:
        self.patience = seconds

    def kill(self) -> None:
        self.killed = True


class FakeGroup(Shard):
    """A group of one rank. Closing it waits for the graphs, as NCCL does."""

    def __init__(self, capture: WeakCapture) -> None:
        self.capture = capture
        self.met = False
        self.closed = False

    def barrier(self) -> None:
        self.met = True

    def close(self) -> None:
        while self.capture.alive:
            time.sleep(0.01)
        self.closed = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, CONFIGS["qwen3, tied"])
    return str(folder)


@pytest.fixture
def group(monkeypatch) -> FakeGroup:
    """The group of the rank that loads, with fake graphs."""
    group = FakeGroup(WeakCapture())
    monkeypatch.setattr(load, "graphs_refused", lambda *_: None)
    monkeypatch.setattr(load, "CudaCapture", lambda _: group.capture)
    monkeypatch.setattr(
        load, "choose", lambda _, site: ChosenBackend(PagedTorch(site.heads), "it is fake", site.tokens_per_block)
    )
    monkeypatch.setattr(leader, "Processes", FakeProcesses)
    monkeypatch.setattr(leader, "open_store", lambda *_: (None, "there:1"))
    monkeypatch.setattr(follower, "connect_store", lambda *_: object())
    for module in (leader, follower):
        monkeypatch.setattr(module, "RankGroup", lambda *_: group)
    return group


@pytest.fixture
def ends() -> list[int]:
    """Exit statuses of rank 0's process."""
    return []


@pytest.fixture
def make_leader(group, ends):
    made = []

    def make(step_seconds: float = 60.0) -> Leader:
        # Both time limits are equal, so that tests do not depend on which one applies.
        made.append(
            Leader(RankEnv(0, 2, 0, 2), step_seconds, step_seconds, structlog.get_logger(), "debug", ends.append)
        )
        return made[-1]

    yield make
    for each in made:
        each._watchdog.stop()


def loaded(leader: Leader, folder: str):
    return leader.load(folder, open_checkpoint(folder), CONFIG, ignore, ignore)


def without_heartbeats(processes: FakeProcesses) -> list[type[Command]]:
    return [type(command) for command in processes.sender.commands if not isinstance(command, Heartbeat)]


def test_the_graphs_are_dropped_before_the_group_ends(make_leader, group, ends, folder):
    leader = make_leader()
    runner = loaded(leader, folder)
    assert group.met
    assert group.capture.alive
    runner.launch(STEP).collect()
    leader.close()
    assert group.closed
    assert not ends
    assert leader._processes.patience > 0
    assert without_heartbeats(leader._processes)[::2] == [LoadModel, Shutdown]
    assert leader._processes.sender.closed


def test_the_other_ranks_get_the_log_level(make_leader):
    assert make_leader()._processes.log_level == "debug"


def test_a_group_that_does_not_end(make_leader, group, ends, folder, monkeypatch):
    """Rank 0 exits and kills the other ranks."""
    monkeypatch.setattr(leader, "END_SECONDS", 0.2)
    one, ended = make_leader(), threading.Event()
    loaded(one, folder)
    monkeypatch.setattr(group, "close", ended.wait)
    one.close()
    assert ends == [EXIT_GROUP_LOST]
    assert one._processes.killed
    ended.set()


def test_a_model_that_was_not_loaded(make_leader, group, ends, folder, monkeypatch):
    """The other ranks are killed immediately."""

    def fail(*_, **__):
        raise ValueError("too long a name")

    monkeypatch.setattr(leader, "load_runner", fail)
    one = make_leader()
    with pytest.raises(ValueError, match="too long"):
        loaded(one, folder)
    one.close()
    assert without_heartbeats(one._processes) == [LoadModel]
    assert one._processes.patience == 0.0
    assert not group.closed
    assert not ends


def test_a_device_that_hangs(make_leader, ends, folder, monkeypatch):
    """The other ranks report the step as completed, since it is queued on their devices."""
    leader, hangs = make_leader(0.5), threading.Event()
    runner = loaded(leader, folder)
    monkeypatch.setattr(runner._forward, "logits", lambda *_: hangs.wait() and None)
    step = runner.launch(STEP)
    collecting = threading.Thread(target=step.collect)
    collecting.start()
    try:
        assert wait_until(lambda: bool(ends))
        assert ends == [EXIT_GROUP_LOST]
        assert leader._processes.killed
    finally:
        hangs.set()
        collecting.join()
    assert runner.waiting_since is None


def test_too_few_gpus(make_leader, folder, monkeypatch):
    """Rank 0 reports the lack of GPUs instead of lost ranks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    leader = make_leader()
    with pytest.raises(ValueError, match="2 ranks need a GPU each, but torch finds 1"):
        leader.load(folder, open_checkpoint(folder), RunnerConfig("auto"), ignore, ignore)
    assert without_heartbeats(leader._processes) == []
    leader.close()


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
    assert group.met
    assert group.closed


def test_another_rank_opens_the_same_revision(group, folder, monkeypatch):
    asked = []

    def opened(model, **options):
        asked.append((model, options))
        return open_checkpoint(folder)

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("engine_worker.parallel.follower.open_checkpoint", opened)
    load = LoadModel("someone/model", open_checkpoint(folder).fingerprint, CONFIG, "there:1", 60.0, 60.0, "v2")
    assert Follower(Commands(load, Shutdown()), RankEnv(1, 2, 1, 2), structlog.get_logger()).run() == 0
    assert asked == [("someone/model", {"revision": "v2"})]


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
    """Nothing else would end this process."""
    command = [sys.executable, "-c", LEAVING]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (3, "last words")
