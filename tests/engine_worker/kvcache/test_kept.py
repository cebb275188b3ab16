"""Retained blocks are kept as long as their request specifies, but never block other requests."""

import pytest

from engine_worker.kvcache.cache import KvCacheManager
from sluice.wire.params import RangeRetention, RetentionParams
from tests.engine_worker.kvcache.sequences import computed, one
from tests.fakes.engine import EngineBench

SYSTEM = range(16)


def keep(priority: int, seconds: float | None = None, start: int = 0, end: int = 16) -> RetentionParams:
    return RetentionParams((RangeRetention(start, end, priority, seconds),))


def flood(bench: EngineBench, seed: int = 0) -> None:
    """Run other prompts of twice the pool's size."""
    for i in range(8):
        bench.submit([50 + (7 * i + 3 * j + seed) % 47 for j in range(16)], max_tokens=1)
        bench.run()


def cached(bench: EngineBench, prompt) -> int:
    request = bench.submit(prompt, max_tokens=1)
    bench.run()
    assert bench.output(request) == bench.expected(request)
    return bench.receiver.opens[request, 0].cached_tokens


def cached_at_allocation(cache: KvCacheManager, prompt) -> int:
    """Number of cached tokens of a prompt."""
    sequence = one([*prompt, 1])
    assert cache.allocate([sequence]) == [sequence]
    num_cached = sequence.num_computed
    cache.release(sequence)
    return num_cached


@pytest.mark.parametrize("num_host_blocks", [0, 4])
def test_a_retained_prompt_is_kept_until_its_duration_ends(num_host_blocks):
    bench = EngineBench(num_blocks=16, num_host_blocks=num_host_blocks)
    bench.submit([*SYSTEM, 48], max_tokens=1, retention=keep(100, seconds=60.0))
    bench.submit([*range(20, 36), 48], max_tokens=1)
    bench.run()
    flood(bench)
    assert cached(bench, [*range(20, 36), 49]) == 0
    flood(bench, seed=1)
    assert cached(bench, [*SYSTEM, 49]) == 16
    bench.clock.now += 60
    flood(bench, seed=2)
    flood(bench, seed=3)
    assert cached(bench, [*SYSTEM, 49]) == 0


def test_the_lowest_priority_is_evicted_first():
    cache = KvCacheManager(num_blocks=12, tokens_per_block=4)
    for prompt, priority in [(SYSTEM, 80), (range(20, 36), 10), (range(40, 56), 50)]:
        cache.release(computed(cache, prompt, keep(priority)))
    cache.release(computed(cache, range(60, 84)))
    assert [cached_at_allocation(cache, prompt) for prompt in (SYSTEM, range(20, 36), range(40, 56))] == [16, 0, 8]


def test_blocks_before_a_retained_block_have_its_priority():
    """The end of a prompt is useless without its beginning."""
    cache = KvCacheManager(num_blocks=8, tokens_per_block=4)
    cache.release(computed(cache, SYSTEM, keep(100, start=12)))
    cache.release(computed(cache, range(20, 36), keep(60)))
    cache.release(computed(cache, range(60, 76)))
    assert cached_at_allocation(cache, SYSTEM) == 16


def test_a_request_without_retention_does_not_change_priorities():
    cache = KvCacheManager(num_blocks=8, tokens_per_block=4)
    for retention in (keep(100), RetentionParams()):
        cache.release(computed(cache, SYSTEM, retention))
    cache.release(computed(cache, range(20, 36)))
    cache.release(computed(cache, range(60, 76)))
    assert cached_at_allocation(cache, SYSTEM) == 16


def test_generated_blocks_have_the_decode_priority():
    cached_tokens = {}
    for priority in (0, 100):
        bench = EngineBench(num_blocks=12)
        request = bench.submit(range(8), max_tokens=13, retention=RetentionParams(decode_priority=priority))
        bench.run()
        bench.submit(range(20, 40), max_tokens=1)
        bench.run()
        bench.submit(range(60, 80), max_tokens=1)
        bench.run()
        cached_tokens[priority] = cached(bench, [*range(8), *bench.output(request)])
    assert cached_tokens[100] == 20
    assert cached_tokens[0] == 8


@pytest.mark.parametrize("num_host_blocks", [0, 6])
def test_a_pool_full_of_retained_blocks_still_serves_requests(num_host_blocks):
    bench = EngineBench(num_blocks=8, num_host_blocks=num_host_blocks)
    for i in range(6):
        request = bench.submit([(16 * i + j) % 97 for j in range(20)], max_tokens=8, retention=keep(100, end=20))
        bench.run()
        assert bench.output(request) == bench.expected(request)
