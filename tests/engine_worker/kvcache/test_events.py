"""KV cache events and the buffer that keeps them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kvcache.events import EventLog
from engine_worker.step import Content
from sluice.wire.adapters import Adapter
from sluice.wire.cache_events import MAX_EVENTS, MAX_ITEMS, MAX_REMOVED, Created, Removed, Stored, Tier, Updated
from sluice.wire.hashing import block_chain, root_hash, short_hash
from sluice.wire.params import RangeRetention, RetentionParams
from tests.examples import examples
from tests.fakes.cache_follower import CacheFollower, contents
from tests.fakes.engine import EngineBench, spec_of

SIZE = 4
PROMPT = list(range(2 * SIZE + 1))
ADAPTER = Adapter("sql", "0" * 32)


def digest(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(8)


def store(log: EventLog, number: int, num_tokens: int = 1) -> None:
    log.stored(Content(digest(number), (number,) * num_tokens), 35)


def bench_with(capacity: int = 1000, num_blocks: int = 8, **options) -> EngineBench:
    return EngineBench(num_blocks, SIZE, kv_event_buffer=capacity, **options)


def events_of(bench: EngineBench, start: int = 0) -> list:
    return bench.cache.tiers.events.since(start).events


def hashes(prompt, salt: str = "", adapter: str = "") -> list[int]:
    return [short_hash(each) for each in block_chain(root_hash("fingerprint", salt, adapter), prompt, SIZE)]


def test_without_a_buffer_there_are_no_events():
    bench = EngineBench(8, SIZE)
    bench.submit(PROMPT)
    bench.run()
    assert bench.cache.tiers.events is None


@pytest.mark.parametrize(("salt", "adapter"), [("", None), ("tenant", None), ("", ADAPTER)])
def test_blocks_are_named_by_hashes_of_their_tokens(salt, adapter):
    version = adapter.version if adapter else ""
    bench = bench_with()
    bench.engine.intake._refusal = lambda _: None  # adapters have no weights here
    bench.send(spec_of(PROMPT, max_tokens=1, salt=salt, adapter=adapter))
    bench.run()
    created, *stored = events_of(bench)
    assert created == Created([8, 0])
    first, second = hashes(PROMPT, salt, version)
    assert stored == [
        Stored(first, None, tuple(PROMPT[:SIZE]), 35, version),
        Stored(second, first, tuple(PROMPT[SIZE : 2 * SIZE]), 35, version),
    ]


def test_a_shared_block_is_stored_once():
    bench = bench_with(num_blocks=32)
    for _ in range(3):
        bench.submit(PROMPT, max_tokens=1)
    bench.run()
    assert len(events_of(bench)) == 1 + len(hashes(PROMPT))


def test_a_block_moves_to_the_host_and_back():
    bench = bench_with(num_blocks=3, num_host_blocks=3)
    for base in (0, 50, 0):
        bench.submit([base + token for token in PROMPT], max_tokens=1)
        bench.run()
    updates = [event for event in events_of(bench) if isinstance(event, Updated)]
    moves = [(event.old_tier, event.tier) for event in updates if event.block == hashes(PROMPT)[0]]
    assert moves == [(Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)]
    assert {(event.old_priority, event.priority) for event in updates} == {(35, 35)}


def test_priorities_change_with_the_request_and_with_time():
    bench = bench_with(num_blocks=6)
    retention = RetentionParams((RangeRetention(0, len(PROMPT), 80, 5.0),))
    bench.submit(PROMPT, max_tokens=1, retention=retention)
    bench.run()
    raised = [event for event in events_of(bench) if isinstance(event, Updated)]
    assert sorted(event.block for event in raised) == sorted(hashes(PROMPT))
    assert {(event.old_priority, event.priority) for event in raised} == {(35, 80)}
    bench.clock.now += 10
    count = len(events_of(bench))
    # The end of the duration takes effect when a block is evicted.
    bench.submit([70 + token for token in range(6 * SIZE - 2)], max_tokens=1)
    bench.run()
    later = events_of(bench, count)
    assert {(event.old_priority, event.priority) for event in later if isinstance(event, Updated)} == {(80, 35)}
    assert {block for event in later if isinstance(event, Removed) for block in event.blocks} >= set(hashes(PROMPT))


def test_a_flush_is_split_into_bounded_events():
    log = EventLog(10, 4096, 0)
    log.removed(digest(number) for number in range(2 * MAX_REMOVED + 1))
    _, *removed = log.since(0).events
    assert [len(event.blocks) for event in removed] == [MAX_REMOVED, MAX_REMOVED, 1]
    assert [block for event in removed for block in event.blocks] == list(range(2 * MAX_REMOVED + 1))


@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_the_latest_events_are_kept_and_gaps_are_visible(capacity):
    log = EventLog(capacity, 8, 0)
    for number in range(1, 20):
        store(log, number)
        first, events = log.since(0)
        assert first == max(0, number + 1 - capacity)
        assert [event.block for event in events if isinstance(event, Stored)] == list(range(max(1, first), number + 1))
    assert log.since(20) == (20, [])
    assert [event.block for event in log.since(19).events] == [19]


def test_slices_fit_in_a_message_and_skip_no_event():
    log = EventLog(3 * MAX_EVENTS, 8, 0)
    for number in range(2 * MAX_EVENTS):
        store(log, number)
    for number in range(3):
        store(log, number, MAX_ITEMS - 10)
    slices, start = [], 0
    while (part := log.since(start)).events:
        assert part.first == start
        slices.append(part)
        start += len(part.events)
    assert start == 1 + 2 * MAX_EVENTS + 3
    assert [len(each.events) for each in slices][-2:] == [1, 1]
    assert all(len(each.events) <= MAX_EVENTS for each in slices)
    assert all(first.first + len(first.events) == second.first for first, second in pairwise(slices))


def test_blocks_that_a_failed_step_should_have_moved_are_removed():
    bench = bench_with(num_blocks=3, num_host_blocks=3)
    follower = CacheFollower()
    for base, fails in ((0, False), (50, False), (0, True)):
        bench.runner.fail_moving = fails
        bench.submit([base + token for token in PROMPT], max_tokens=1)
        bench.run()
        follower.read(bench.cache.tiers.events)
        assert follower.blocks == contents(bench.cache.tiers)
    assert any(isinstance(event, Removed) for event in events_of(bench))


retentions = st.builds(
    lambda priority, seconds: RetentionParams((RangeRetention(0, 5, priority, seconds),)),
    st.sampled_from([35, 0, 90]),
    st.sampled_from([None, 1.0]),
)
action_lists = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 3), retentions),
        st.tuples(st.sampled_from(["flush", "wait", "fail"])),
    ),
    min_size=1,
    max_size=25,
)


@given(action_lists, st.sampled_from([0, 1, 2, 4]), st.sampled_from([None, 3]))
@examples(100)
def test_replayed_events_give_the_contents_of_a_small_cache(actions, num_host_blocks, window):
    bench = bench_with(num_blocks=3, num_host_blocks=num_host_blocks, window=window)
    follower = CacheFollower()
    for what, *details in actions:
        if what == "submit":
            base, retention = details
            bench.submit([20 * base + token for token in PROMPT], max_tokens=1, retention=retention)
            bench.run()
        elif what == "flush":
            bench.cache.tiers.flush()
        elif what == "fail":
            bench.runner.fail_moving = True
        else:
            bench.clock.now += 2
        follower.read(bench.cache.tiers.events)
        assert follower.blocks == contents(bench.cache.tiers)
    assert follower.dropped == 0
