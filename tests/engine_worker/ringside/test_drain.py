"""A draining engine: the work that it still does, and when it exits."""

import threading
import time

import pytest
from structlog.testing import capture_logs

from engine_worker.ringside.worker import Worker
from sluice.wire.errors import FinishReason
from sluice.wire.requests import Cancel
from tests.engine_worker.ringside.world import LIMIT, stall
from tests.fakes.lanes import FakeLane
from tests.fakes.processes import wait_until

pytestmark = pytest.mark.slow


def test_a_stopped_worker_finishes_its_requests_and_refuses_new_ones(start, runner):
    world = start()
    world.hello()
    entered, may_continue = stall(runner)
    world.submit(1, [1])
    assert entered.wait(LIMIT)
    world.worker.stop()
    world.submit(2, [2])
    may_continue.set()
    world.read(lambda: len(world.ends()) == 2)
    ends = {row.request: row.end for row in world.rows if row.end}
    assert ends[1].reason is FinishReason.LENGTH
    assert ends[2].fault.code == "DRAINING"
    world.thread.join(LIMIT)
    assert not world.thread.is_alive()
    assert world.heartbeats(lambda heartbeat: heartbeat.draining)


def test_a_drain_is_announced_immediately(start, runner, monkeypatch):
    """During a long step, and long before the next regular heartbeat."""
    monkeypatch.setattr("engine_worker.ringside.heartbeats.HEARTBEAT_SECONDS", 3600.0)
    world = start()
    entered, may_continue = stall(runner)
    world.hello()
    world.submit(1, [1])
    assert entered.wait(LIMIT)
    world.worker.stop()
    # Two heartbeats may arrive, because one more follows after a lane was opened.
    assert {heartbeat.draining for heartbeat in world.heartbeats(bool)} == {True}
    may_continue.set()


def test_if_all_routers_have_ended_a_drained_engine_exits_immediately(start, monkeypatch):
    monkeypatch.setattr("engine_worker.ringside.worker.DRAIN_NOTICE_SECONDS", 3600.0)
    world = start(drain_timeout=3600)
    world.hello()
    world.heartbeats(bool)
    world.router.close()
    world.worker.stop()
    world.thread.join(LIMIT)
    assert not world.thread.is_alive()


def test_a_draining_engine_exits_when_its_requests_were_cancelled(start, runner):
    world = start(drain_timeout=3600)
    world.hello()
    # Wait for the cancel at the end of the step: it may not have arrived when the step continues.
    entered, may_continue = stall(runner, lambda: world.worker._inbox.wait(LIMIT))
    world.submit(1, [1], max_tokens=60)
    assert entered.wait(LIMIT)
    world.worker.stop()
    world.heartbeats(lambda heartbeat: heartbeat.draining)
    assert world.lane.send(Cancel(1, 0, world.worker.epoch))
    may_continue.set()
    world.read(world.ends)
    assert [end.reason for end in world.ends()] == [FinishReason.ABORTED]
    world.thread.join(LIMIT)
    assert not world.thread.is_alive()


def test_a_detokenizer_that_reads_nothing_does_not_delay_the_exit(start, monkeypatch):
    monkeypatch.setattr("engine_worker.ringside.worker.STUCK_SECONDS", 0.1)
    stuck = FakeLane(room=0)
    monkeypatch.setattr(Worker, "_open_lane", lambda *_: stuck)
    with capture_logs() as logs:
        world = start(drain_timeout=3600)
        world.submit(1, [1], max_tokens=4)
        assert wait_until(lambda: world.worker._outbox.waiting and not world.worker._engine.live.requests)
        world.worker.stop()
        world.thread.join(LIMIT)
    assert not world.thread.is_alive()
    (lost,) = [line for line in logs if line["event"] == "rows_lost"]
    assert (lost["detokenizer"], lost["rows"], lost["opens"]) == (world.detokenizer.address, 1, 1)
    assert [line["rows_lost"] for line in logs if line["event"] == "stopped"] == [1]


def test_requests_that_outlast_the_drain_are_ended(start, runner):
    world = start(drain_timeout=0.2)
    entered, stopped, run = threading.Event(), threading.Event(), runner.run

    def slow(step):
        # From the second step on, wait until the test has read the first rows and stopped the worker.
        while entered.is_set() and not stopped.wait(0.01):
            world.worker._outbox.flush()
        entered.set()
        time.sleep(0.05)  # 60 such steps take longer than drain_timeout
        return run(step)

    runner.run = slow
    world.hello()
    world.submit(1, [1], max_tokens=60)
    world.read(lambda: world.rows)
    world.worker.stop()
    stopped.set()
    world.read(world.ends)
    assert world.ends()[0].fault.code == "DRAINING"
    world.thread.join(LIMIT)
    assert not world.thread.is_alive()
