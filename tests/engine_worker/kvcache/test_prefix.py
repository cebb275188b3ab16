"""Prefix reuse: blocks are found by the hash of their tokens."""

import pytest

from engine_worker.kvcache import prefix
from tests.fakes.engine import EngineBench

pytestmark = pytest.mark.usefixtures("both_overlaps")
step_by_step = pytest.mark.parametrize("both_overlaps", [False], ids=[""], indirect=True)
"""For tests of single steps: without overlap only."""


def cached_tokens(bench: EngineBench, request: int) -> int:
    return bench.receiver.opens[request, 0].cached_tokens


def test_full_blocks_of_an_ended_request_are_reused():
    bench = EngineBench()
    bench.submit(range(11), max_tokens=1)
    bench.run()
    computed = bench.runner.computed
    request = bench.submit([*range(11), 50, 51], max_tokens=3)
    bench.run()
    assert cached_tokens(bench, request) == 8
    assert bench.runner.computed - computed == 13 - 8 + 2
    assert bench.output(request) == bench.expected(request)
    assert bench.cache.hit_ratio == 8 / 24


def test_generated_tokens_are_reused_too():
    bench = EngineBench()
    first = bench.submit(range(6), max_tokens=7)
    bench.run()
    request = bench.submit([*range(6), *bench.output(first), 3], max_tokens=2)
    bench.run()
    assert cached_tokens(bench, request) == 12
    assert bench.output(request) == bench.expected(request)


@pytest.mark.parametrize("size", range(1, 14))
def test_the_last_token_is_computed_again(size):
    bench = EngineBench()
    requests = []
    for _ in range(2):
        requests.append(bench.submit(range(size), max_tokens=2))
        bench.run()
    assert cached_tokens(bench, requests[1]) == (size - 1) // 4 * 4
    assert bench.output(requests[0]) == bench.output(requests[1]) == bench.expected(requests[0])


def test_different_salts_share_no_blocks():
    bench = EngineBench()
    requests = []
    for salt in ("", "x", "", "x", "y"):
        requests.append(bench.submit(range(9), salt=salt))
        bench.run()
    assert [cached_tokens(bench, request) for request in requests] == [0, 0, 8, 8, 0]


def test_a_hash_collision_is_a_miss(monkeypatch):
    monkeypatch.setattr(prefix, "block_hash", lambda parent, tokens, virtual: b"same")
    bench = EngineBench()
    requests = [bench.submit(prompt, max_tokens=9) for prompt in (range(9), range(20, 29), [*range(4), *range(30, 36)])]
    for _ in range(2):
        requests.append(bench.submit(range(20, 29), max_tokens=9))
        bench.run()
    assert all(bench.output(request) == bench.expected(request) for request in requests)


def test_reuse_can_be_disabled():
    bench = EngineBench(block_reuse=False)
    for _ in range(2):
        request = bench.submit(range(9))
        bench.run()
    assert cached_tokens(bench, request) == 0
    assert bench.cache.tiers.flush() == 0


def test_a_prefix_is_evicted_from_its_tail_and_least_recently_used_first():
    bench = EngineBench(num_blocks=8)
    old, new, big = range(17), range(20, 29), range(40, 57)
    for prompt in (old, new, big):
        bench.submit(prompt, max_tokens=1)
        bench.run()
    # 4 + 2 blocks were cached and 2 free. The large prompt needed 5: the free ones and the tail of the old prompt.
    newest = bench.submit(new, max_tokens=1)
    bench.run()
    oldest = bench.submit(old, max_tokens=1)
    bench.run()
    assert cached_tokens(bench, newest) == 8
    assert cached_tokens(bench, oldest) == 4


def test_flush_empties_the_cache_and_live_requests_continue():
    bench = EngineBench()
    bench.submit(range(9), max_tokens=1)
    bench.run()
    live = bench.submit(range(30, 39), max_tokens=12)
    bench.step()
    assert bench.engine.cache.tiers.flush() == 2
    bench.run()
    repeated = bench.submit(range(9), max_tokens=1)
    bench.run()
    assert cached_tokens(bench, repeated) == 0
    assert bench.output(live) == bench.expected(live)


def test_a_failed_step_publishes_nothing():
    bench = EngineBench()
    bench.runner.fail = "after"
    bench.submit(range(9))
    bench.run()
    request = bench.submit(range(9))
    bench.run()
    assert cached_tokens(bench, request) == 0
    assert bench.output(request) == bench.expected(request)
