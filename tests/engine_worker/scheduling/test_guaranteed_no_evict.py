"""GuaranteedNoEvict: a request begins only if all begun requests can finish."""

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.request import Request, Sequence, State
from engine_worker.scheduling.context import SchedulerContext
from engine_worker.scheduling.guaranteed_no_evict import GuaranteedNoEvict
from sluice.settings.engine import SchedulerNames
from tests.engine_worker.kvcache.sequences import computed, one
from tests.fakes.engine import EngineBench, spec_of

POLICY = SchedulerNames("guaranteed_no_evict")


def arrived(number: int, size: int, max_tokens: int, n: int = 1, **fields) -> Sequence:
    """The first sequence of a request whose prompt is not shared."""
    spec = spec_of(range(number, number + size), max_tokens, n=n, **fields)
    return Request(spec, b"root", number, 0.0).sequences[0]


def admitted(cache: KvCacheManager, *active: Sequence, batch: int = 8) -> list[Sequence]:
    fitting, paused = GuaranteedNoEvict(SchedulerContext(cache, batch, 16)).schedule_request(active)
    assert paused == []
    return fitting


def test_prompt_and_max_tokens_are_counted():
    cache = KvCacheManager(10, 4)
    first, second, third = arrived(1, 8, 12), arrived(2, 8, 12), arrived(3, 4, 4)
    assert admitted(cache, first, second, third) == [first, second]


def test_the_blocks_of_a_holder_are_not_counted_twice():
    cache = KvCacheManager(10, 4)
    first, second = arrived(1, 8, 12), arrived(2, 8, 12)
    cache.allocate([first])
    assert admitted(cache, first, second) == [first, second]
    cache.allocate([second])
    assert cache.pool.available == 6
    assert admitted(cache, first, second, arrived(3, 1, 1)) == [first, second]


def test_a_large_request_is_not_overtaken():
    cache = KvCacheManager(10, 4)
    first, big, small = arrived(1, 8, 12), arrived(2, 30, 10), arrived(3, 1, 1)
    cache.allocate([first])
    assert admitted(cache, first, big, small) == [first]
    cache.release(first)
    assert admitted(cache, big, small) == [big]


def test_all_sequences_of_a_request_are_counted():
    for num_blocks, fitting in [(14, 1), (15, 2)]:
        cache = KvCacheManager(num_blocks, 4)
        first, four = arrived(1, 8, 12), arrived(2, 4, 4, n=5)
        assert len(admitted(cache, first, four)) == fitting
        if fitting == 2:
            cache.allocate([first, four])
            # The siblings still await the prompt; the blocks that they will need are reserved.
            assert admitted(cache, first, four, arrived(3, 1, 1)) == [first, four]


def test_a_resumed_request_is_reserved_as_a_whole():
    for num_blocks, begins in [(13, False), (14, True)]:
        cache = KvCacheManager(num_blocks, 4, reuse=False)
        first = arrived(1, 8, 12)
        cache.allocate([first])
        # Three sequences of three blocks each: 0 and 2 are resumed, 1 computes the prompt.
        resumed = arrived(2, 8, 4, n=3, resume={0: [1, 2], 2: [3]})
        zero, one, two = resumed.request.sequences
        last = arrived(3, 1, 1)
        for active in ([first, zero, one, two, last], [first, zero, last, two, one]):
            assert admitted(cache, *active) == ([first, zero, one, two] if begins else [first])


def test_resumed_sequences_of_a_begun_request_go_first():
    cache = KvCacheManager(9, 4)
    zero, one, two = arrived(2, 8, 4, n=3, resume={0: [1, 2], 2: [3]}).request.sequences
    other = arrived(1, 8, 12)
    # The others wait until 0 has computed the prompt; their blocks are reserved.
    assert admitted(cache, zero, one, two, other) == [zero]
    cache.allocate([zero])
    assert admitted(cache, other, zero, one, two) == [zero]
    cache.commit(zero, 10)
    assert admitted(cache, other, zero, one, two) == [zero, one, two]


def test_awaiting_siblings_of_a_resumed_sequence_are_counted():
    cache = KvCacheManager(12, 4, reuse=False)
    zero, one, two, three = arrived(2, 8, 4, n=4, resume={0: [1, 2]}).request.sequences
    assert [two.state, three.state] == [State.AWAITING] * 2
    assert admitted(cache, zero, one, arrived(3, 1, 1)) == [zero, one]
    cache.allocate([zero, one])
    assert admitted(cache, zero, one, arrived(3, 1, 1)) == [zero, one]
    small = KvCacheManager(11, 4, reuse=False)
    holder = arrived(1, 1, 1)
    small.allocate([holder])
    assert admitted(small, holder, *arrived(2, 8, 4, n=4, resume={0: [1, 2]}).request.sequences[:2]) == [holder]


def test_batch_slots_are_counted_too():
    cache = KvCacheManager(100, 4)
    first, four, last = arrived(1, 4, 4), arrived(2, 4, 4, n=4), arrived(3, 4, 4)
    assert admitted(cache, first, four, last, batch=4) == [first]
    assert admitted(cache, first, four, last, batch=5) == [first, four]
    assert admitted(cache, first, four, last, batch=6) == [first, four, last]


def test_a_shared_prefix_counts_once_while_it_is_held():
    cache = KvCacheManager(9, 4)
    first, second = arrived(1, 16, 8), arrived(1, 16, 8)
    cache.allocate([first])
    cache.commit(first, 16)
    first.append(0)
    assert admitted(cache, first, second) == [first, second]
    cache.release(first)
    # The cached blocks are not held now, so they count as available.
    other = arrived(50, 16, 4)
    assert admitted(cache, second, other) == [second]


def test_a_shared_window_saves_no_blocks_on_any_tier():
    """Each sequence soon has a separate window: four blocks for a chunk of two and the tokens that it attends to."""
    for num_host_blocks in (0, 8):
        for num_blocks, fitting in [(7, 1), (8, 2)]:
            cache = KvCacheManager(num_blocks, 4, num_host_blocks=num_host_blocks, window=6, chunk=8)
            cache.release(computed(cache, range(8)))
            if num_host_blocks:
                flood = [arrived(100 * number, 4, 1) for number in range(1, num_blocks + 1)]
                assert cache.allocate(flood) == flood
                for sequence in flood:
                    cache.release(sequence)
            sharing = [one([*range(8), number]) for number in (60, 61)]
            assert admitted(cache, *sharing) == sharing[:fitting]
            assert cache.allocate(sharing[:fitting]) == sharing[:fitting]
            assert cache.tiers.onloads == (2 if num_host_blocks else 0)


def test_a_request_too_large_for_the_pool_or_the_batch_runs_alone():
    for sizes in ({"num_blocks": 12, "max_batch_size": 8}, {"num_blocks": 80, "max_batch_size": 2}):
        bench = EngineBench(schedulers=POLICY, **sizes)
        before, big, after = (
            bench.submit(range(i, i + 8), max_tokens=12, n=n, seed=i) for i, n in enumerate((1, 4, 1))
        )
        while bench.engine.live.requests or bench.inbox:
            bench.step()
            holding = {s.request.submit.request for s in bench.cache.holders}
            assert not {before, big} <= holding
            assert after not in holding or all(s.blocks for s in bench.engine.live.active)
            assert all(s.state is not State.PREEMPTED for s in bench.engine.live.active)
        for request, n in ((before, 1), (big, 4), (after, 1)):
            for index in range(n):
                assert bench.output(request, index) == bench.expected(request, index)


def test_sequences_of_a_request_start_right_after_its_prompt():
    """Even if a request of higher priority has arrived that needs the memory."""
    bench = EngineBench(num_blocks=20, schedulers=POLICY, block_reuse=False)
    bench.submit(range(8), max_tokens=12, n=4, request=1)
    bench.step()
    bench.submit(range(20, 36), max_tokens=12, request=2, priority=3)
    bench.step()
    assert len(bench.cache.holders) == 4
    assert {s.request.submit.request for s in bench.cache.holders} == {1}
    bench.run()
