"""The journal: which changes a router receives, and when it receives the full state."""

from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kvcache.journal import Journal
from sluice.wire.hashing import short_hash
from sluice.wire.heartbeats import CacheChanges


def digest(block: int) -> bytes:
    return bytes([block]) * 16


def block(number: int) -> int:
    return short_hash(digest(number))


def test_without_changes_since_returns_none():
    journal = Journal()
    assert journal.since(0) is None
    journal.store(digest(1))
    assert journal.since(1) is None


def test_changes_are_reported_once_each():
    journal = Journal()
    journal.store(digest(1))
    journal.store(digest(2))
    journal.remove(digest(1))
    assert journal.since(0) == CacheChanges(0, 3, [block(2)], [block(1)])
    assert journal.since(1) == CacheChanges(1, 3, [block(2)], [block(1)])
    assert journal.since(2) == CacheChanges(2, 3, [], [block(1)])


def test_a_router_that_is_too_far_behind_or_ahead_receives_the_full_state():
    journal = Journal(capacity=2)
    for number in range(5):
        journal.store(digest(number))
    everything = CacheChanges(0, 5, [block(number) for number in range(5)], whole=True)
    for version in (0, 2, 6, 99):
        changes = journal.since(version)
        assert sorted(changes.stored) == sorted(everything.stored)
        assert (changes.after, changes.last, changes.whole, changes.removed) == (0, 5, True, [])
    assert journal.since(3) == CacheChanges(3, 5, [block(3), block(4)])


def test_after_a_flush_the_full_state_is_reported():
    journal = Journal()
    journal.store(digest(1))
    journal.clear()
    journal.store(digest(2))
    assert journal.since(1) == CacheChanges(0, 3, [block(2)], whole=True)
    assert journal.since(2) == CacheChanges(2, 3, [block(2)])


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["store", "remove", "clear", "read", "read twice"]))),
    st.integers(1, 8),
)
def test_a_reader_of_changes_knows_the_findable_blocks(actions, capacity):
    journal, findable, version, known = Journal(capacity), set(), 0, set()
    for number, action in actions:
        if action == "store" and number not in findable:
            findable.add(number)
            journal.store(digest(number))
        elif action == "remove" and number in findable:
            findable.discard(number)
            journal.remove(digest(number))
        elif action == "clear":
            findable.clear()
            journal.clear()
        elif action.startswith("read"):
            changes = journal.since(version)
            for _ in range(2 if action == "read twice" else 1):
                if changes is not None:
                    known = (set() if changes.whole else known) - set(changes.removed) | set(changes.stored)
                    version = changes.last
            assert known == {block(block_hash) for block_hash in findable}
