"""The router's view of an engine's cache equals the engine's reports, with heartbeats lost, late or repeated."""

from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kvcache.tiers import Journal
from router.peers.prefix_index import SLICE_BLOCKS, PrefixIndex
from sluice.ring.heartbeats import CacheNews
from sluice.ring.timing import CACHE_REPORT_SECONDS
from tests.fakes.cache_journal import FakeJournal

MOST = 100_000
CHAIN = (1, 2, 3, 4)


def apply(cache, *news):
    for found in news:
        cache.begin_update(found)
        while cache.continue_update():
            pass


def knows(cache, blocks):
    """Which of these are cached, taken one by one."""
    return {block for block in blocks if cache.prefix((block,), 0.0)}


def news_of(*blocks, after=0, last=1, removed=(), whole=False):
    return CacheNews(after, last, list(blocks), list(removed), whole)


BLOCKS = st.integers(0, 11)
CHANGES = st.lists(
    st.one_of(st.tuples(st.just("store"), BLOCKS), st.tuples(st.just("remove"), BLOCKS), st.just(("flush",))),
    max_size=6,
)


@given(st.lists(st.tuples(CHANGES, st.lists(st.floats(0, 1), max_size=3)), max_size=12), st.integers(1, 12))
def test_any_heartbeats_that_come_through_in_any_order_give_what_the_engine_said(rounds, most):
    """Each round some changes, then some of all the heartbeats ever sent: lost ones, late ones, repeated ones."""
    journal, cache, heartbeats = FakeJournal(most), PrefixIndex(MOST), []
    for changes, arriving in rounds:
        for what, *blocks in changes:
            getattr(journal, what)(*blocks)
        heartbeats.append(journal.news(cache.version))
        for where in arriving:
            before = cache.version
            apply(cache, heartbeats[round(where * (len(heartbeats) - 1))])
            assert cache.version >= before
            assert knows(cache, range(12)) == journal.at(cache.version)
    apply(cache, journal.news(cache.version))
    assert cache.version == journal.last
    assert knows(cache, range(12)) == journal.findable


@given(st.lists(st.tuples(CHANGES, st.booleans()), max_size=12), st.integers(1, 12))
def test_it_understands_the_engines_own_journal(rounds, capacity):
    journal, cache, findable = Journal(capacity), PrefixIndex(MOST), set()
    for changes, arrives in rounds:
        for what, *blocks in changes:
            if what == "flush":
                journal.clear()
                findable.clear()
            elif (what == "store") != (blocks[0] in findable):
                getattr(journal, what)(bytes([0] * 7 + blocks))
                findable ^= set(blocks)
        news = journal.since(cache.version)
        if arrives and news is not None:
            apply(cache, news)
            assert knows(cache, range(12)) == findable


def test_news_that_do_not_follow_on_are_ignored():
    cache = PrefixIndex(MOST)
    apply(cache, news_of(1, after=5, last=6))
    assert (cache.version, knows(cache, CHAIN)) == (0, set())
    apply(cache, news_of(1, 2, last=6, whole=True), news_of(3, after=7, last=8))
    assert (cache.version, knows(cache, CHAIN)) == (6, {1, 2})
    apply(cache, news_of(3, after=6, last=8, removed=[1]), news_of(1, after=5, last=7), news_of(1, last=3, whole=True))
    assert (cache.version, knows(cache, CHAIN)) == (8, {2, 3})


def test_whole_news_replace_what_was_known():
    cache = PrefixIndex(MOST)
    apply(cache, news_of(1, 2, last=6, whole=True), news_of(3, last=9, whole=True))
    assert (cache.version, knows(cache, CHAIN)) == (9, {3})


def test_many_news_are_applied_in_slices_and_count_when_they_are_through():
    count = 3 * SLICE_BLOCKS
    cache = PrefixIndex(MOST)
    cache.begin_update(news_of(*range(count), last=count, whole=True))
    turns = 0
    while cache.version == 0:
        # What comes meanwhile comes again.
        cache.begin_update(news_of(MOST, after=0, last=count + 1, whole=True))
        cache.continue_update()
        turns += 1
    assert turns > 3
    assert cache.version == count
    assert cache.prefix((0, count - 1, MOST), 0.0) == 2


def test_memory_is_bounded_and_forgets_the_ends_of_unused_chains_first():
    cache = PrefixIndex(6)
    apply(cache, news_of(1, 2, 3, 11, 12, 13, last=6, whole=True))
    cache.expect((1, 2, 3))
    cache.drop((1, 2, 3))
    apply(cache, news_of(21, 22, after=6, last=8))
    assert knows(cache, range(30)) == {1, 2, 3, 13, 21, 22}
    apply(cache, news_of(31, 32, after=8, last=10))
    assert knows(cache, range(40)) == {1, 2, 21, 22, 31, 32}


def test_what_was_placed_is_expected_until_the_news_had_time_to_come():
    cache = PrefixIndex(MOST)
    cache.expect(CHAIN)
    assert cache.prefix(CHAIN, 1e9) == 4
    cache.on_computed(CHAIN, 100.0)
    assert cache.prefix(CHAIN, 100.0 + CACHE_REPORT_SECONDS - 0.1) == 4
    apply(cache, news_of(1, 2, last=2, whole=True))
    assert cache.prefix(CHAIN, 100.0 + CACHE_REPORT_SECONDS) == 2
    assert not cache._expected


def test_a_request_that_still_waits_keeps_what_another_one_brought():
    cache = PrefixIndex(MOST)
    cache.expect(CHAIN)
    cache.expect(CHAIN[:2])
    cache.on_computed(CHAIN, 0.0)
    assert cache.prefix(CHAIN, 2 * CACHE_REPORT_SECONDS) == 2
    cache.drop(CHAIN[:2])
    assert cache.prefix(CHAIN, 2 * CACHE_REPORT_SECONDS) == 0


def test_a_flush_leaves_what_is_still_to_be_computed():
    cache = PrefixIndex(MOST)
    apply(cache, news_of(7, last=1, whole=True))
    cache.expect((1, 2))
    cache.on_computed((1, 2), 0.0)
    cache.expect((3, 4))
    cache.flush()
    assert knows(cache, range(10)) == {3, 4}
    cache.drop((3, 4))
    assert not cache._expected
