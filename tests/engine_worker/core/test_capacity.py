"""MaxUtilization without an engine: which sequences may hold memory."""

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.request import Request, Sequence
from engine_worker.scheduling.context import SchedulerContext
from engine_worker.scheduling.max_utilization import MaxUtilization
from tests.fakes.engine import spec_of


def arrived(number: int, size: int, max_tokens: int = 40, priority: int = 2) -> Sequence:
    spec = spec_of(range(size), max_tokens, priority=priority)
    return Request(spec, b"root", number, 0.0).sequences[0]


def holding(cache: KvCacheManager, *sequences: Sequence) -> None:
    """Allocate blocks for the sequences and compute all their tokens but the newest one."""
    assert cache.allocate(sequences) == list(sequences)
    for sequence in sequences:
        cache.commit(sequence, sequence.num_pending)
        sequence.append(0)


def scheduler(cache: KvCacheManager, batch: int = 8, tokens: int = 16) -> MaxUtilization:
    return MaxUtilization(SchedulerContext(cache, batch, tokens))


def test_all_sequences_that_fit_are_admitted():
    cache = KvCacheManager(20, 4)
    first, second, third = arrived(1, 4), arrived(2, 4), arrived(3, 4)
    holding(cache, first)
    assert scheduler(cache).schedule_request([first, second, third]) == ([first, second, third], [])
    assert second.blocks == []


def test_no_sequence_is_admitted_in_a_step_that_preempts():
    """The preempted sequence releases enough blocks for the first and for a small third, which still comes after it."""
    cache = KvCacheManager(8, 4, reuse=False)
    first, big, small = arrived(1, 8), arrived(2, 24, max_tokens=8), arrived(3, 1, max_tokens=1)
    holding(cache, first, big)
    assert scheduler(cache).schedule_request([first, big, small]) == ([first], [big])
    assert cache.pool.available == 0


def test_the_last_in_order_is_preempted_even_if_it_arrived_first():
    cache = KvCacheManager(4, 4, reuse=False)
    low, normal = arrived(1, 8, priority=1), arrived(2, 8)
    holding(cache, low, normal)
    assert scheduler(cache).schedule_request([normal, low]) == ([normal], [low])


def test_a_growing_sequence_may_be_preempted_itself():
    cache = KvCacheManager(4, 4, reuse=False)
    first, last = arrived(1, 7), arrived(2, 8)
    holding(cache, first, last)
    assert scheduler(cache).schedule_request([first, last]) == ([first], [last])


def test_a_small_sequence_does_not_overtake_a_large_one():
    cache = KvCacheManager(10, 4)
    first, big, small = arrived(1, 12), arrived(2, 32, max_tokens=8), arrived(3, 1)
    holding(cache, first)
    assert scheduler(cache).schedule_request([first, big, small]) == ([first], [])


def test_at_most_max_batch_size_sequences_hold_memory():
    cache = KvCacheManager(40, 4)
    sequences = [arrived(number, 2) for number in range(5)]
    assert scheduler(cache, batch=3).schedule_request(sequences) == (sequences[:3], [])


def test_admitted_sequences_have_room_for_their_context_and_a_block():
    """Contexts of at most three steps and a block of four tokens make 14 tokens each, which are four blocks."""
    for num_blocks, fitting in [(7, 1), (8, 2)]:
        cache = KvCacheManager(num_blocks, 4, reuse=False)
        sequences = [arrived(1, 7, max_tokens=8), arrived(2, 7, max_tokens=8)]
        assert scheduler(cache).schedule_request(sequences) == (sequences[:fitting], [])


def test_longer_contexts_need_more_headroom():
    for tokens, fitting in [(64, 2), (10, 1)]:
        cache = KvCacheManager(21, 4, reuse=False)
        sequences = [arrived(1, 4), arrived(2, 60)]
        holding(cache, sequences[0])
        assert scheduler(cache, tokens=tokens).schedule_request(sequences) == (sequences[:fitting], [])


def test_a_single_sequence_may_fill_the_pool():
    cache = KvCacheManager(8, 4)
    sequence = arrived(1, 30, max_tokens=2)
    assert scheduler(cache).schedule_request([sequence]) == ([sequence], [])
