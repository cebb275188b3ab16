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


def test_all_copies_together_hold_at_most_half_of_the_free_blocks(ring: Ring) -> None:
    prompts = [range(start, start + len(PROMPT)) for start in (0, 20, 40)]
    first = ring.engine("a", num_blocks=60)
    for prompt in prompts:
        first.submit(prompt, max_tokens=1)
    first.run()
    second = ring.engine("b", num_blocks=24)
    gate = Gate(second)
    for prompt in prompts:
        second.submit(prompt, max_tokens=1)
    second.step()
    assert len(second.cache.fetches.held) == 12
    gate.opened.set()
    second.run()
    assert second.cache.fetches.fetched == 12
