from collections import Counter

import pytest

from engine_worker.kvcache.eviction import DEFAULT
from engine_worker.kvcache.pool import BlockPool, CacheCorruptError
from engine_worker.step import Content


def content(name: str) -> Content:
    return Content(name.encode(), tuple(map(ord, name)))


def cached(pool: BlockPool, name: str) -> int:
    block, _ = pool.allocate()
    pool.publish(block, content(name))
    pool.release(block)
    return block


def test_a_block_without_content_becomes_free_and_one_with_content_cached():
    pool = BlockPool(2)
    plain, block = pool.allocate()[0], cached(pool, "a")
    pool.release(plain)
    assert pool.available == 2
    assert pool.find(content("a")) == block
    pool.check(Counter())


def test_the_least_recently_used_is_evicted_first_and_only_when_none_is_free():
    pool = BlockPool(3)
    a, b = cached(pool, "a"), cached(pool, "b")
    pool.hold(a)
    pool.release(a)
    first, second = pool.allocate(), pool.allocate()
    assert first[0] not in (a, b)
    assert first[1] is None
    assert second == (b, (content("b"), DEFAULT, False))
    assert pool.find(content("b")) is None
    assert pool.find(content("a")) == a


def test_a_hash_with_other_tokens_is_a_miss():
    pool = BlockPool(1)
    cached(pool, "a")
    assert pool.find(Content(b"a", (1, 2))) is None


def test_the_second_block_with_the_same_content_is_not_findable():
    pool = BlockPool(2)
    first = cached(pool, "a")
    second = cached(pool, "a")
    assert pool.find(content("a")) == first != second
    pool.check(Counter())


def test_held_blocks_are_not_available_and_the_pool_runs_out():
    pool = BlockPool(1)
    block = cached(pool, "a")
    pool.hold(block)
    assert pool.available == 0
    with pytest.raises(IndexError):
        pool.allocate()
    pool.check(Counter([block]))


def test_flush_frees_cached_blocks_and_keeps_held_ones():
    pool = BlockPool(3)
    held, _ = pool.allocate()
    pool.publish(held, content("held"))
    cached(pool, "a")
    assert pool.flush() == 1
    assert pool.find(content("held")) is None
    pool.release(held)
    pool.check(Counter())
    assert pool.flush() == 0


def test_releasing_a_block_too_often_raises():
    pool = BlockPool(1)
    pool.release(pool.allocate()[0])
    with pytest.raises(CacheCorruptError, match="more often"):
        pool.release(0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool.references.__setitem__(0, 2), "held 1 times, counted 2"),
        (lambda pool: pool._free.pop(), "do not add up to the 4 blocks"),
        (lambda pool: pool._free.append(pool._free[0]), "do not add up to the 4 blocks"),
        (lambda pool: pool._index.clear(), "is not in the index"),
        (lambda pool: pool._index.update(x=3), "without content"),
        (lambda pool: pool._stored.__setitem__(pool._index.pop(b"a"), None), "not findable"),
    ],
)
def test_check_detects_corruption(damage, message):
    pool = BlockPool(4)
    held, _ = pool.allocate()
    cached(pool, "a")
    pool.check(Counter([held]))
    damage(pool)
    with pytest.raises(CacheCorruptError, match=message):
        pool.check(Counter([held]))
