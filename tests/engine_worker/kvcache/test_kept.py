"""What requests ask to be kept is kept, for as long as they ask, and never at the price of a wedge."""

import pytest

from engine_worker.kvcache.cache import KvCacheManager
from sluice.ring.params import RangeRetention, RetentionParams
from tests.engine_worker.kvcache.sequences import computed, one
from tests.fakes.engine import EngineBench

SYSTEM = range(16)


def keep(priority: int, seconds: float | None = None, start: int = 0, end: int = 16) -> RetentionParams:
    return RetentionParams((RangeRetention(start, end, priority, seconds),))


def flood(bench: EngineBench, seed: int = 0) -> None:
    """Twice the pool of other prompts."""
    for i in range(8):
        bench.submit([50 + (7 * i + 3 * j + seed) % 47 for j in range(16)], max_tokens=1)
        bench.run()


def cached(bench: EngineBench, prompt) -> int:
    request = bench.submit(prompt, max_tokens=1)
    bench.run()
    assert bench.output(request) == bench.expected(request)
    return bench.receiver.opens[request, 0].cached_tokens


def found(cache: KvCacheManager, prompt) -> int:
    """Tokens of a prompt that are in the cache."""
    sequence = one([*prompt, 1])
    assert cache.allocate([sequence]) == [sequence]
    found = sequence.num_computed
    cache.release(sequence)
    return found


@pytest.mark.parametrize("num_host_blocks", [0, 4])
def test_a_system_prompt_survives_a_flood_until_its_time_is_over(num_host_blocks):
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


def test_the_least_wanted_goes_first():
    cache = KvCacheManager(num_blocks=12, tokens_per_block=4)
    for prompt, priority in [(SYSTEM, 80), (range(20, 36), 10), (range(40, 56), 50)]:
        cache.release(computed(cache, prompt, keep(priority)))
    cache.release(computed(cache, range(60, 84)))
    assert [found(cache, prompt) for prompt in (SYSTEM, range(20, 36), range(40, 56))] == [16, 0, 8]


def test_what_comes_before_is_kept_as_eagerly():
    """The end of a prompt alone is no use."""
    cache = KvCacheManager(num_blocks=8, tokens_per_block=4)
    cache.release(computed(cache, SYSTEM, keep(100, start=12)))
    cache.release(computed(cache, range(20, 36), keep(60)))
    cache.release(computed(cache, range(60, 76)))
    assert found(cache, SYSTEM) == 16


def test_a_request_that_names_nothing_leaves_a_priority_as_it_is():
    cache = KvCacheManager(num_blocks=8, tokens_per_block=4)
    for retention in (keep(100), RetentionParams()):
        cache.release(computed(cache, SYSTEM, retention))
    cache.release(computed(cache, range(20, 36)))
    cache.release(computed(cache, range(60, 76)))
    assert found(cache, SYSTEM) == 16


def test_generated_blocks_have_the_decode_priority():
    kept = {}
    for priority in (0, 100):
        bench = EngineBench(num_blocks=12)
        request = bench.submit(range(8), max_tokens=13, retention=RetentionParams(decode_priority=priority))
        bench.run()
        bench.submit(range(20, 40), max_tokens=1)
        bench.run()
        bench.submit(range(60, 80), max_tokens=1)
        bench.run()
        kept[priority] = cached(bench, [*range(8), *bench.output(request)])
    assert kept[100] == 20
    assert kept[0] == 8


@pytest.mark.parametrize("num_host_blocks", [0, 6])
def test_a_pool_full_of_what_is_to_be_kept_serves_on(num_host_blocks):
    bench = EngineBench(num_blocks=8, num_host_blocks=num_host_blocks)
    for i in range(6):
        request = bench.submit([(16 * i + j) % 97 for j in range(20)], max_tokens=8, retention=keep(100, end=20))
        bench.run()
        assert bench.output(request) == bench.expected(request)
