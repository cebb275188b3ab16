"""KvCacheManager without an engine."""

import pytest

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.kvcache.pool import CacheCorruptError
from engine_worker.step import Move, MoveKind
from tests.engine_worker.kvcache.sequences import computed, one, request


def test_a_sequence_has_all_its_blocks_or_none():
    cache = KvCacheManager(num_blocks=6, tokens_per_block=4)
    cache.release(computed(cache, range(8)))
    small, big, other = one(range(20, 24)), one([*range(8), *range(30, 60)]), one(range(60, 72))
    assert cache.allocate([small, big, other]) == [small, other]
    assert big.blocks == []
    assert big.num_computed == 0
    assert big not in cache.holders
    cache.check()
    cache.release(small)
    cache.release(other)
    cache.check()
    assert cache.pool.available == 6


def test_no_sequence_evicts_the_prefix_of_another():
    cache = KvCacheManager(num_blocks=6, tokens_per_block=4)
    cache.release(computed(cache, range(8)))
    first, second = one(range(20, 32)), one(range(11))
    assert cache.allocate([first, second]) == [first, second]
    assert second.num_computed == 8
    cache.check()


def test_what_a_forecast_admits_can_be_allocated():
    cache = KvCacheManager(num_blocks=7, tokens_per_block=4)
    cache.release(computed(cache, range(8)))
    holder = computed(cache, range(40, 44))
    waiting = [one(range(9)), one(range(10)), one(range(50, 53)), one(range(60, 64))]
    forecast = cache.forecast()
    holder.append(1)
    assert forecast.grow(holder)
    fitting = [sequence for sequence in waiting if forecast.admit(sequence, headroom=0)]
    assert fitting == waiting[:3]
    assert forecast.available == 0
    assert cache.pool.available == 6
    assert cache.allocate([holder, *fitting]) == [holder, *fitting]
    assert cache.pool.available == 0
    cache.check()


def test_a_forecast_frees_shared_blocks_with_their_last_holder():
    cache = KvCacheManager(num_blocks=8, tokens_per_block=4)
    holders = [computed(cache, range(9)) for _ in range(2)]
    assert cache.pool.available == 4
    forecast = cache.forecast()
    forecast.release(holders[0])
    assert forecast.available == 5
    forecast.release(holders[1])
    assert forecast.available == 8


def test_headroom_remains_available():
    cache = KvCacheManager(num_blocks=4, tokens_per_block=4)
    forecast = cache.forecast()
    assert not forecast.admit(one(range(8)), headroom=3)
    assert forecast.available == 4
    assert forecast.admit(one(range(8)), headroom=2)
    assert forecast.available == 2


def test_a_block_with_a_pending_copy_can_be_the_source_of_another():
    """Moves are carried out in order and before anything is written, so it does not matter who releases the source."""
    cache = KvCacheManager(num_blocks=16, tokens_per_block=4)
    first, second, third = request(range(6), n=3).sequences
    cache.allocate([first])
    cache.commit(first, 6)
    for sequence in (first, second, third):
        sequence.append(9)
    cache.allocate([second])
    source, copy = first.blocks[1], second.blocks[1]
    cache.release(first)
    assert cache.pool.references[source] == 0
    cache.allocate([third])
    assert third.num_computed == second.num_computed == 6
    moves = [Move(MoveKind.COPY, source, copy), Move(MoveKind.COPY, copy, third.blocks[1])]
    assert cache.tiers.take_moves() == tuple(moves)
    assert cache.tiers.take_moves() == ()
    cache.check()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a, b: b.blocks.__setitem__(1, a.blocks[1]), "is held 2 times, counted 1"),
        (lambda a, b: a.blocks.pop(), "is held 0 times, counted 1"),
    ],
)
def test_check_compares_tables_with_reference_counts(damage, message):
    cache = KvCacheManager(num_blocks=16, tokens_per_block=4)
    a, b = computed(cache, range(6)), computed(cache, range(20, 26))
    damage(a, b)
    with pytest.raises(CacheCorruptError, match=message):
        cache.check()


def test_check_notices_a_written_block_in_two_tables():
    cache = KvCacheManager(num_blocks=16, tokens_per_block=4)
    a, b = computed(cache, range(6)), computed(cache, range(20, 26))
    cache.pool.release(b.blocks[1])
    b.blocks[1] = a.blocks[1]
    cache.pool.hold(a.blocks[1])
    with pytest.raises(CacheCorruptError, match="written by one sequence but in the tables of several"):
        cache.check()


def test_check_notices_more_tokens_than_blocks():
    cache = KvCacheManager(num_blocks=16, tokens_per_block=4)
    holder = computed(cache, range(6))
    holder.num_computed = 9
    with pytest.raises(CacheCorruptError, match="2 blocks for 9 of 6 tokens"):
        cache.check()
