"""The common prefix of prompts that arrive together is computed once."""

import pytest

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.request import State
from tests.engine_worker.kvcache.sequences import one
from tests.fakes.engine import EngineBench


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("budget", [4, 6, 16, 64])
def test_the_prompt_is_computed_once(budget, window):
    bench = EngineBench(max_tokens_per_step=budget, max_batch_size=4, window=window)
    requests = [bench.submit(range(26), max_tokens=3, seed=i) for i in range(6)]
    bench.run()
    assert all(bench.output(request) == bench.expected(request) for request in requests)
    # Six full blocks are shared. Each request computes the two prompt tokens after them and two output tokens.
    assert bench.runner.computed == 26 + 5 * 2 + 6 * 2


def test_sequences_wait_only_for_shared_blocks():
    bench = EngineBench(max_tokens_per_step=8)
    first = bench.submit(range(40), max_tokens=3)
    second = bench.submit([*range(8), *range(60, 80)], max_tokens=3)
    bench.step()
    assert bench.engine.live.requests[second].sequences[0].state is State.WAITING
    bench.step()
    assert bench.engine.live.requests[second].sequences[0].num_computed == 8
    bench.run()
    assert bench.runner.computed == 40 + 20 + 2 * 2
    assert all(bench.output(request) == bench.expected(request) for request in (first, second))


def test_a_waiting_sequence_does_not_block_those_after_it():
    bench = EngineBench(max_tokens_per_step=8)
    bench.submit(range(40))
    waiting, other = bench.submit(range(40)), bench.submit([90])
    bench.step()
    assert bench.engine.live.requests[waiting].sequences[0].state is State.WAITING
    assert bench.engine.live.requests[other].sequences[0].state is State.RUNNING
    bench.run()


@pytest.mark.parametrize("ending", ["cancelled", "failed", "flushed"])
def test_no_sequence_waits_for_one_that_has_ended(ending):
    bench = EngineBench(max_tokens_per_step=8)
    first, second = bench.submit(range(40)), bench.submit(range(40))
    bench.step()
    if ending == "cancelled":
        bench.cancel(first)
    elif ending == "failed":
        bench.runner.fail = "after"
    else:
        bench.engine.cache.tiers.flush()
    bench.run()
    assert bench.output(second) == bench.expected(second)


def test_no_sequence_waits_for_one_after_it_in_order():
    """A request of low priority may take long, so one of high priority computes the prompt itself."""
    bench = EngineBench(max_tokens_per_step=8)
    low = bench.submit(range(40), priority=1)
    bench.step()
    high = bench.submit(range(40), priority=3)
    bench.step()
    assert bench.engine.live.requests[high].sequences[0].state is State.RUNNING
    bench.run()
    assert bench.output(high) == bench.output(low) == bench.expected(low)


@pytest.mark.parametrize("num_blocks", [12, 14, 20])
def test_waiting_ends_even_when_memory_is_short(num_blocks):
    bench = EngineBench(num_blocks=num_blocks, max_tokens_per_step=8, max_batch_size=6)
    requests = [bench.submit(range(24 + i // 3), max_tokens=16, n=1 + i % 2) for i in range(9)]
    bench.run()
    assert all(bench.output(request) == bench.expected(request) for request in requests)


def test_salts_do_not_wait_for_each_other():
    bench = EngineBench(max_tokens_per_step=16)
    bench.submit(range(12), salt="x")
    other = bench.submit(range(12), salt="y")
    bench.step()
    assert bench.engine.live.requests[other].sequences[0].state is State.RUNNING
    bench.run()


def test_without_reuse_no_sequence_waits():
    bench = EngineBench(block_reuse=False)
    requests = [bench.submit(range(12)) for _ in range(2)]
    bench.step()
    assert all(bench.engine.live.requests[request].sequences[0].output for request in requests)
    bench.run()


def test_a_forecast_includes_the_sequences_it_has_admitted():
    cache = KvCacheManager(num_blocks=16, tokens_per_block=4)
    first, second, third = (one(range(10), number=number) for number in (1, 2, 3))
    forecast = cache.forecast()
    assert not forecast.awaits(first)
    assert forecast.admit(first, headroom=0)
    assert forecast.awaits(second)
    cache.allocate([first])
    assert cache.forecast().awaits(second)
    cache.commit(first, 8)
    assert not cache.forecast().awaits(second)
    fresh = cache.forecast()
    fresh.release(first)
    assert not fresh.awaits(third)


def test_the_statistics_of_a_request_count_its_blocks():
    bench = EngineBench(max_tokens_per_step=8)
    requests = [bench.submit(range(26), max_tokens=8) for _ in range(2)]
    bench.step()
    first = bench.engine.live.requests[requests[0]]
    bench.run()
    second = bench.submit(range(26), max_tokens=8)
    bench.step()
    request = bench.engine.live.requests[second]
    bench.run()
    assert (first.blocks_allocated, first.blocks_reused, first.blocks_missed) == (9, 0, 6)
    assert (request.blocks_allocated, request.blocks_reused, request.blocks_missed) == (3, 6, 0)
