"""A short run of the engine's state machines; `python -m tests.engine_worker.core.long_run` runs it for longer."""

import pytest
from hypothesis import HealthCheck

from sluice.wire.params import RetentionParams
from tests.engine_worker.core.machine import EngineMachine
from tests.engine_worker.core.machine_inputs import BASES
from tests.engine_worker.core.machine_ring import RingMachine
from tests.examples import examples

# Five seconds each on an idle machine, many times that on a busy one. The machines limit the number of steps.
pytestmark = pytest.mark.timeout(600)

TestEngine = EngineMachine.TestCase
TestEngine.settings = examples(60, stateful_step_count=40, suppress_health_check=list(HealthCheck))

TestRing = RingMachine.TestCase
TestRing.settings = examples(20, stateful_step_count=40, suppress_health_check=list(HealthCheck))


def test_a_failed_step_should_have_offloaded_what_the_next_one_loads():
    """Found by a long run: holders that rely on the lost content compute it again."""
    machine = EngineMachine()
    machine.start(
        tokens=48, tokens_per_block=1, host=1, window=None, batch=6, budget=6, chunked=True, reuse=True,
        policy="max_utilization", chunking="first_come_first_served", aging=0.0, overlap=True,
    )  # fmt: skip
    request = {
        "base": BASES[0], "shared": 12, "suffix": [], "max_tokens": 17, "min_tokens": 0, "ends": (), "salt": "",
        "retention": RetentionParams(), "lane": "mem://a", "copies": 2,
    }  # fmt: skip
    machine.submit(n=2, priority=1, time_limit=None, **request)
    machine.many_steps(count=18)
    machine.submit(n=1, priority=2, time_limit=0.05, **request)
    machine.steps(count=1)
    machine.step_may_fail(when="before")
    machine.time_passes(seconds=0.1)
    cache = machine.bench.cache
    lost = []
    undo = cache.undo
    cache.undo = lambda *moves: lost.extend(undo(*moves)) or lost
    machine.many_steps(count=8)
    assert lost
    machine.outputs_are_right_so_far()
    machine.teardown()
