"""Who may hold memory, asked without an engine."""

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.request import Request
from engine_worker.scheduling.context import SchedulerContext
from engine_worker.scheduling.max_utilization import MaxUtilization
from engine_worker.sequence import Sequence
from tests.fakes.engine import spec_of


def arrived(number: int, size: int, max_tokens: int = 40, priority: int = 2) -> Sequence:
    spec = spec_of(range(size), max_tokens, priority=priority)
    return Request(spec, b"root", number, 0.0).sequences[0]


def holding(cache: KvCacheManager, *sequences: Sequence) -> None:
    """They get blocks, and everything they have but their newest token is computed."""
    assert cache.allocate(sequences) == list(sequences)
    for sequence in sequences:
        cache.commit(sequence, sequence.num_pending)
        sequence.append(0)


def scheduler(cache: KvCacheManager, batch: int = 8, tokens: int = 16) -> MaxUtilization:
    return MaxUtilization(SchedulerContext(cache, batch, tokens))


def test_everybody_who_fits():
    cache = KvCacheManager(20, 4)
    first, second, third = arrived(1, 4), arrived(2, 4), arrived(3, 4)
    holding(cache, first)
    assert scheduler(cache).schedule_request([first, second, third]) == ([first, second, third], [])
    assert second.blocks == []


def test_nobody_is_admitted_in_the_step_that_pauses_somebody():
    """The paused one frees more than the first wants: enough for a small third, but that comes after it."""
    cache = KvCacheManager(8, 4, reuse=False)
    first, big, small = arrived(1, 8), arrived(2, 24, max_tokens=8), arrived(3, 1, max_tokens=1)
    holding(cache, first, big)
    assert scheduler(cache).schedule_request([first, big, small]) == ([first], [big])
    assert cache.pool.available == 0


def test_the_last_in_order_is_paused_whoever_came_first():
    cache = KvCacheManager(4, 4, reuse=False)
    low, normal = arrived(1, 8, priority=1), arrived(2, 8)
    holding(cache, low, normal)
    assert scheduler(cache).schedule_request([normal, low]) == ([normal], [low])


def test_one_that_wants_blocks_may_have_to_pause_itself():
    cache = KvCacheManager(4, 4, reuse=False)
    first, last = arrived(1, 7), arrived(2, 8)
    holding(cache, first, last)
    assert scheduler(cache).schedule_request([first, last]) == ([first], [last])


def test_a_small_one_does_not_overtake_a_big_one():
    cache = KvCacheManager(10, 4)
    first, big, small = arrived(1, 12), arrived(2, 32, max_tokens=8), arrived(3, 1)
    holding(cache, first)
    assert scheduler(cache).schedule_request([first, big, small]) == ([first], [])


def test_those_that_hold_memory_are_at_most_a_batch():
    cache = KvCacheManager(40, 4)
    sequences = [arrived(number, 2) for number in range(5)]
    assert scheduler(cache, batch=3).schedule_request(sequences) == (sequences[:3], [])


def test_the_admitted_have_room_to_get_somewhere():
    """Contexts of at most three steps and a block of four tokens: 14 tokens each, that is four blocks."""
    for num_blocks, fitting in [(7, 1), (8, 2)]:
        cache = KvCacheManager(num_blocks, 4, reuse=False)
        sequences = [arrived(1, 7, max_tokens=8), arrived(2, 7, max_tokens=8)]
        assert scheduler(cache).schedule_request(sequences) == (sequences[:fitting], [])


def test_the_longer_the_contexts_take_the_more_room_is_wanted():
    for tokens, fitting in [(64, 2), (10, 1)]:
        cache = KvCacheManager(21, 4, reuse=False)
        sequences = [arrived(1, 4), arrived(2, 60)]
        holding(cache, sequences[0])
        assert scheduler(cache, tokens=tokens).schedule_request(sequences) == (sequences[:fitting], [])


def test_one_alone_may_fill_the_pool():
    cache = KvCacheManager(8, 4)
    sequence = arrived(1, 30, max_tokens=2)
    assert scheduler(cache).schedule_request([sequence]) == ([sequence], [])
