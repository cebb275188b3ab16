"""Requests whose router was replaced or has fallen silent."""

import time

import pytest

from sluice.wire.errors import FinishReason
from tests.engine_worker.ringside.world import LIMIT, stall

pytestmark = pytest.mark.slow


def test_requests_of_a_replaced_router_end(start, runner):
    def wait_for_messages() -> None:
        """The messages may not have arrived when the first request's step continues. Waiting in each of its steps gives
        them time."""
        if 1 in world.worker._engine.live.requests:
            world.worker._inbox.wait(0.5)

    entered, may_continue = stall(runner, wait_for_messages)
    world = start()
    world.hello(epoch=1)
    world.submit(1, [1, 2, 3], max_tokens=50)
    assert entered.wait(LIMIT)
    world.submit(2, [3, 4], max_tokens=50)
    for epoch in (2, 1):
        # The late hello of the replaced router must have no effect.
        world.hello(epoch=epoch)
    world.submit(3, [5, 6])
    may_continue.set()
    world.read(lambda: len(world.ends()) == 3)
    ends = {row.request: row.end.fault.code if row.end.fault else row.end.reason for row in world.rows if row.end}
    assert ends == {1: "ROWS_LOST", 2: "ROWS_LOST", 3: FinishReason.LENGTH}


def test_requests_of_a_silent_router_end_with_an_error(start, runner, monkeypatch):
    monkeypatch.setattr("engine_worker.ringside.heartbeats.ROUTER_SILENCE_SECONDS", 0.1)
    monkeypatch.setattr("engine_worker.ringside.mailbox.CHECK_SECONDS", 0.2)
    entered, may_continue = stall(runner)
    world = start()
    world.hello()
    world.submit(1, [1, 2, 3], max_tokens=50)
    assert entered.wait(LIMIT)
    time.sleep(0.3)
    may_continue.set()
    world.read(world.ends)
    assert world.ends()[0].fault.code == "ROWS_LOST"
