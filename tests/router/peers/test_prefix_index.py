"""The router's index of an engine's cache equals the cache, even if heartbeats are lost, late or repeated."""

from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kvcache.tiers import Journal
from router.peers.prefix_index import SLICE_BLOCKS, PrefixIndex
from sluice.wire.heartbeats import CacheChanges
from sluice.wire.timing import CACHE_REPORT_SECONDS
from tests.fakes.cache_journal import FakeJournal

MAX_BLOCKS = 100_000
CHAIN = (1, 2, 3, 4)


def apply(cache, *reports):
    for report in reports:
        cache.begin_update(report)
        while cache.continue_update():
            pass


def knows(cache, blocks):
    """The blocks that are cached, each looked up separately."""
    return {block for block in blocks if cache.prefix((block,), 0.0)}


def changes_of(*blocks, after=0, last=1, removed=(), whole=False):
    return CacheChanges(after, last, list(blocks), list(removed), whole)


BLOCKS = st.integers(0, 11)
CHANGES = st.lists(
    st.one_of(st.tuples(st.just("store"), BLOCKS), st.tuples(st.just("remove"), BLOCKS), st.just(("flush",))),
    max_size=6,
)


@given(st.lists(st.tuples(CHANGES, st.lists(st.floats(0, 1), max_size=3)), max_size=12), st.integers(1, 12))
def test_the_index_is_right_for_any_heartbeats_in_any_order(rounds, max_kept):
    """In each round the cache changes, then any of the heartbeats sent so far arrive, possibly late or repeatedly."""
    journal, cache, heartbeats = FakeJournal(max_kept), PrefixIndex(MAX_BLOCKS), []
    for changes, arriving in rounds:
        for change, *blocks in changes:
            getattr(journal, change)(*blocks)
        heartbeats.append(journal.changes_since(cache.version))
        for position in arriving:
            version_before = cache.version
            apply(cache, heartbeats[round(position * (len(heartbeats) - 1))])
            assert cache.version >= version_before
            assert knows(cache, range(12)) == journal.at(cache.version)
    apply(cache, journal.changes_since(cache.version))
    assert cache.version == journal.last
    assert knows(cache, range(12)) == journal.findable


@given(st.lists(st.tuples(CHANGES, st.booleans()), max_size=12), st.integers(1, 12))
def test_it_applies_reports_of_the_engines_journal(rounds, capacity):
    journal, cache, findable = Journal(capacity), PrefixIndex(MAX_BLOCKS), set()
    for changes, arrives in rounds:
        for change, *blocks in changes:
            if change == "flush":
                journal.clear()
                findable.clear()
            elif (change == "store") != (blocks[0] in findable):
                getattr(journal, change)(bytes([0] * 7 + blocks))
                findable ^= set(blocks)
        report = journal.since(cache.version)
        if arrives and report is not None:
            apply(cache, report)
            assert knows(cache, range(12)) == findable


def test_reports_that_do_not_continue_from_the_version_are_ignored():
    cache = PrefixIndex(MAX_BLOCKS)
    apply(cache, changes_of(1, after=5, last=6))
    assert (cache.version, knows(cache, CHAIN)) == (0, set())
    apply(cache, changes_of(1, 2, last=6, whole=True), changes_of(3, after=7, last=8))
    assert (cache.version, knows(cache, CHAIN)) == (6, {1, 2})
    apply(
        cache,
        changes_of(3, after=6, last=8, removed=[1]),
        changes_of(1, after=5, last=7),
        changes_of(1, last=3, whole=True),
    )
    assert (cache.version, knows(cache, CHAIN)) == (8, {2, 3})


def test_a_whole_report_replaces_the_index():
    cache = PrefixIndex(MAX_BLOCKS)
    apply(cache, changes_of(1, 2, last=6, whole=True), changes_of(3, last=9, whole=True))
    assert (cache.version, knows(cache, CHAIN)) == (9, {3})


def test_a_large_report_is_applied_in_slices_and_takes_effect_when_complete():
    count = 3 * SLICE_BLOCKS
    cache = PrefixIndex(MAX_BLOCKS)
    cache.begin_update(changes_of(*range(count), last=count, whole=True))
    turns = 0
    while cache.version == 0:
        # A report that arrives in the meantime is ignored and will be repeated.
        cache.begin_update(changes_of(MAX_BLOCKS, after=0, last=count + 1, whole=True))
        cache.continue_update()
        turns += 1
    assert turns > 3
    assert cache.version == count
    assert cache.prefix((0, count - 1, MAX_BLOCKS), 0.0) == 2


def test_memory_is_bounded_and_ends_of_unused_chains_are_evicted_first():
    cache = PrefixIndex(6)
    apply(cache, changes_of(1, 2, 3, 11, 12, 13, last=6, whole=True))
    cache.expect((1, 2, 3))
    cache.drop((1, 2, 3))
    apply(cache, changes_of(21, 22, after=6, last=8))
    assert knows(cache, range(30)) == {1, 2, 3, 13, 21, 22}
    apply(cache, changes_of(31, 32, after=8, last=10))
    assert knows(cache, range(40)) == {1, 2, 21, 22, 31, 32}


def test_a_placed_prompt_is_expected_until_a_report_had_time_to_arrive():
    cache = PrefixIndex(MAX_BLOCKS)
    cache.expect(CHAIN)
    assert cache.prefix(CHAIN, 1e9) == 4
    cache.on_computed(CHAIN, 100.0)
    assert cache.prefix(CHAIN, 100.0 + CACHE_REPORT_SECONDS - 0.1) == 4
    apply(cache, changes_of(1, 2, last=2, whole=True))
    assert cache.prefix(CHAIN, 100.0 + CACHE_REPORT_SECONDS) == 2
    assert not cache._expected


def test_blocks_stay_expected_while_a_waiting_request_needs_them():
    cache = PrefixIndex(MAX_BLOCKS)
    cache.expect(CHAIN)
    cache.expect(CHAIN[:2])
    cache.on_computed(CHAIN, 0.0)
    assert cache.prefix(CHAIN, 2 * CACHE_REPORT_SECONDS) == 2
    cache.drop(CHAIN[:2])
    assert cache.prefix(CHAIN, 2 * CACHE_REPORT_SECONDS) == 0


def test_a_flush_keeps_blocks_that_are_not_computed_yet():
    cache = PrefixIndex(MAX_BLOCKS)
    apply(cache, changes_of(7, last=1, whole=True))
    cache.expect((1, 2))
    cache.on_computed((1, 2), 0.0)
    cache.expect((3, 4))
    cache.flush()
    assert knows(cache, range(10)) == {3, 4}
    cache.drop((3, 4))
    assert not cache._expected
