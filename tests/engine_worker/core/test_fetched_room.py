"""Copies of blocks need room, which running requests need, too."""

import pytest

from sluice.settings.engine import SchedulerNames
from sluice.wire.errors import FinishReason
from tests.engine_worker.core.test_fetches import PROMPT, Gate, Ring, ring

__all__ = ["ring"]


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "static_batch"])
def test_copies_leave_the_blocks_that_running_requests_may_need(ring: Ring, policy: str) -> None:
    first = ring.engine("a")
    first.submit(PROMPT, max_tokens=1)
    first.run()
    second = ring.engine("b", num_blocks=20, schedulers=SchedulerNames(policy))
    running = second.submit(range(50, 70), max_tokens=50)
    second.step()
    gate = Gate(second)
    fetching = second.submit(PROMPT, max_tokens=4)
    for _ in range(60):
        second.step()
    assert second.ended(running) is FinishReason.LENGTH
    gate.opened.set()
    second.run()
    assert second.cache.preemptions == 0
    assert second.cache.fetches.fetched <= 2
    assert second.output(fetching) == second.expected(fetching)


def test_a_sequence_waits_for_blocks_that_copies_hold(ring: Ring) -> None:
    """It is not preempted for them, and nothing is logged as stuck."""
    first = ring.engine("a")
    first.submit(PROMPT, max_tokens=1)
    first.run()
    second = ring.engine("b", num_blocks=11)
    running = second.submit(range(50, 54), max_tokens=36)
    second.step()
    gate = Gate(second)
    for seed in range(4):
        second.submit(PROMPT, max_tokens=1, seed=seed)
    while second.step():
        pass
    assert second.engine.live.requests
    assert second.cache.pool.available == 0
    gate.opened.set()
    second.run()
    assert second.cache.preemptions == 0
    assert not second.engine._scheduler._warnings._counts
    assert second.output(running) == second.expected(running)
