"""Blocks before the attention window."""

import pytest

from engine_worker.kvcache.cache import KvCacheManager
from sluice.wire.params import RangeRetention, RetentionParams
from tests.engine_worker.kvcache.sequences import computed, one, request
from tests.fakes.engine import EngineBench


def cached_tokens(bench: EngineBench, request: int) -> int:
    return bench.receiver.opens[request, 0].cached_tokens


@pytest.mark.parametrize("window", [2, 5, 8, 9])
@pytest.mark.parametrize("reuse", [True, False])
def test_block_use_stays_flat(window, reuse):
    bench = EngineBench(window=window, max_tokens_per_step=8, block_reuse=reuse)
    request = bench.submit(range(50), max_tokens=200)
    used = []
    while bench.engine.live.requests or bench.inbox:
        bench.step()
        used.append(bench.engine.stats.latest.used_kv_blocks)
    assert bench.output(request) == bench.expected(request)
    assert max(used) <= bench.cache.geometry.max_blocks(250) <= -(-(window + 8 + 6) // 4)
    assert max(used[10:]) <= -(-(window + 3) // 4) + 1


def test_a_sequence_may_be_longer_than_the_pool():
    bench = EngineBench(num_blocks=6, window=8, max_tokens_per_step=8)
    request = bench.submit([i % 97 for i in range(150)], max_tokens=40)
    bench.run()
    assert bench.output(request) == bench.expected(request)


def test_without_chunking_a_context_must_fit_whole():
    bench = EngineBench(num_blocks=6, window=8, chunked_context=False)
    long, short = bench.submit(range(30)), bench.submit(range(16))
    bench.run()
    assert bench.fault(long) == "CONTEXT_OVERFLOW"
    assert bench.output(short) == bench.expected(short)


@pytest.mark.parametrize("num_blocks", [6, 8, 12])
@pytest.mark.parametrize("window", [3, 8, 13])
def test_more_than_fit(num_blocks, window):
    bench = EngineBench(num_blocks=num_blocks, window=window, max_tokens_per_step=8, max_batch_size=5)
    numbers = [bench.submit(range(i, i + 21), max_tokens=30, n=2) for i in range(4)]
    bench.run()
    for number in numbers:
        assert [bench.output(number, i) for i in range(2)] == [bench.expected(number, i) for i in range(2)]


def test_blocks_before_the_window_are_released_and_cached():
    cache = KvCacheManager(num_blocks=8, tokens_per_block=4, window=6, chunk=8)
    sequence = computed(cache, range(24))
    assert sequence.first_block == (24 - 5) // 4
    assert cache.pool.available == 8 - (len(sequence.blocks) - sequence.first_block)
    cache.check()
    repeated = one(range(9))
    assert cache.allocate([repeated]) == [repeated]
    assert repeated.num_computed == 8
    cache.check()


def test_the_cached_blocks_of_the_last_window_suffice():
    """A prompt is reused up to its last cached window, even if the blocks before were evicted."""
    cache = KvCacheManager(num_blocks=12, tokens_per_block=4, window=6, chunk=8)
    cache.release(computed(cache, range(32)))
    others = [one(range(50 + 20 * i, 58 + 20 * i)) for i in range(3)]
    assert cache.allocate(others) == others
    for other in others:
        cache.release(other)
    repeated = one(range(33))
    assert cache.pool.find(repeated.chain[0]) is None if repeated.chain else True
    assert cache.allocate([repeated]) == [repeated]
    assert repeated.num_computed == 32
    assert repeated.first_block == (32 - 5) // 4
    assert cache.pool.find(repeated.chain[0]) is None
    cache.check()


def test_with_a_gap_in_the_last_window_an_earlier_one_is_used():
    cache = KvCacheManager(num_blocks=16, tokens_per_block=4, window=9, chunk=8)
    first = computed(cache, range(32))
    cache.release(first)
    cache.tiers.device.forget(cache.pool.find(first.chain[6]))
    repeated = one(range(33))
    assert cache.allocate([repeated]) == [repeated]
    assert repeated.num_computed == 24
    assert repeated.first_block == 4


def test_a_fork_holds_only_the_blocks_in_its_window():
    cache = KvCacheManager(num_blocks=16, tokens_per_block=4, window=6, chunk=32)
    first, second = request(range(22), n=2).sequences
    cache.allocate([first])
    cache.commit(first, 22)
    for sequence in (first, second):
        sequence.append(9)
    assert cache.allocate([first, second]) == [first, second]
    assert second.first_block == first.first_block == 4
    assert second.num_computed == 22
    assert second.blocks[4] == first.blocks[4]
    assert second.blocks[5] != first.blocks[5]
    cache.check()


def test_no_fork_from_a_sequence_whose_window_has_left_the_prompt():
    for reuse in (True, False):
        bench = EngineBench(window=4, max_batch_size=2, max_tokens_per_step=8, block_reuse=reuse)
        request = bench.submit(range(10), max_tokens=30, n=4)
        bench.run()
        assert all(bench.output(request, i) == bench.expected(request, i) for i in range(4))


def test_blocks_before_the_window_have_the_requested_retention():
    eagerly = RetentionParams((RangeRetention(0, 8, 100),))
    cache = KvCacheManager(num_blocks=6, tokens_per_block=4, window=4, chunk=4)
    cache.release(computed(cache, range(16), eagerly))
    others = [one(range(50 + 20 * i, 54 + 20 * i)) for i in range(4)]
    assert cache.allocate(others) == others
    for other in others:
        cache.release(other)
    repeated = one(range(9))
    cache.allocate([repeated])
    assert repeated.num_computed == 8


def test_what_a_forecast_admits_can_be_allocated():
    cache = KvCacheManager(num_blocks=12, tokens_per_block=4, window=8, chunk=8)
    cache.release(computed(cache, range(30)))
    holder = computed(cache, range(50, 70))
    waiting = [one(range(31)), one(range(29)), one(range(60, 90)), one(range(80, 96))]
    holder.append(1)
    forecast = cache.forecast()
    assert forecast.grow(holder)
    fitting = [sequence for sequence in waiting if forecast.admit(sequence, headroom=0)]
    assert fitting
    assert cache.allocate([holder, *fitting]) == [holder, *fitting]
    assert cache.pool.available >= forecast.available
    cache.check()


def test_growth_to_the_end_excludes_shared_blocks():
    """Two sequences that share a whole window will each need a separate one."""
    cache = KvCacheManager(num_blocks=12, tokens_per_block=4, window=8, chunk=4)
    first = computed(cache, range(25))
    second = one(range(25))
    cache.allocate([second])
    forecast = cache.forecast()
    max_blocks = cache.geometry.max_blocks(45)
    assert forecast.growth_to_end(first) == max_blocks - (len(first.blocks) - first.first_block)
    assert forecast.growth_to_end(second) == max_blocks - (len(second.blocks) - second.num_found)


def test_a_shared_window_saves_no_blocks():
    """A newcomer soon replaces it: the blocks that it needs now and later are those of a whole window."""
    cache = KvCacheManager(num_blocks=20, tokens_per_block=4, window=8, chunk=4)
    computed(cache, range(25))
    second, forecast = one(range(25)), cache.forecast()
    available, growth = forecast.available, forecast.growth_to_end(second)
    assert forecast.admit(second, headroom=0)
    assert available - forecast.available + growth == cache.geometry.max_blocks(45)
