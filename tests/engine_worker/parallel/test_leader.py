"""How rank 0 starts and ends a group of ranks."""

import threading

import pytest
import structlog
import torch

from engine_worker.parallel.channel import EXIT_GROUP_LOST
from engine_worker.parallel.commands import Command, Heartbeat, LoadModel, Shutdown
from engine_worker.parallel.leader import Leader
from engine_worker.parallel.rank_env import RankEnv
from engine_worker.runner.config import RunnerConfig
from engine_worker.step import Slice, Step
from sluice.checkpoint.folder import open_checkpoint
from tests.engine_worker.parallel.fake_group import CONFIG, FakeProcesses, ignore
from tests.fakes.processes import wait_until

STEP = Step((Slice([1, 2], 0, [0], ()),))


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
    assert group.barrier_reached
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
    monkeypatch.setattr("engine_worker.parallel.leader.END_SECONDS", 0.2)
    leader, ended = make_leader(), threading.Event()
    loaded(leader, folder)
    monkeypatch.setattr(group, "close", ended.wait)
    leader.close()
    assert ends == [EXIT_GROUP_LOST]
    assert leader._processes.killed
    ended.set()


def test_a_model_that_was_not_loaded(make_leader, group, ends, folder, monkeypatch):
    """The other ranks are killed immediately."""

    def fail(*_, **__):
        raise ValueError("too long a name")

    monkeypatch.setattr("engine_worker.parallel.leader.load_runner", fail)
    leader = make_leader()
    with pytest.raises(ValueError, match="too long"):
        loaded(leader, folder)
    leader.close()
    assert without_heartbeats(leader._processes) == [LoadModel]
    assert leader._processes.patience == 0.0
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
