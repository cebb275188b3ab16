"""Pages of adapters limit admission like blocks, under every policy."""

import pytest

from sluice.settings.engine import SchedulerNames
from tests.fakes.adapters import ScriptedAdapters, adapter
from tests.fakes.engine import EngineBench


@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict", "static_batch"])
def test_a_request_whose_adapter_does_not_fit_is_not_overtaken(policy):
    first, second = adapter("a"), adapter("b")
    library = ScriptedAdapters(2, {first.version: 2, second.version: 2})
    bench = EngineBench(max_batch_size=4, adapters=library, schedulers=SchedulerNames(policy))
    holder = bench.submit([1, 2, 3], max_tokens=6, adapter=first)
    waiting, behind = bench.submit([4, 5, 6], adapter=second), bench.submit([7, 8, 9])
    for _ in range(3):
        bench.step()
    assert {number for number, *_ in bench.receiver.streams} == {holder}
    bench.run()
    for request in (holder, waiting, behind):
        assert bench.output(request) == bench.expected(request)
