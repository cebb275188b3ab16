"""Retentions: priorities over time, and the eviction order that follows from them."""

from itertools import pairwise
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kvcache.eviction import (
    COMPACT_AT,
    DEFAULT,
    EvictionOrder,
    Phase,
    higher,
    remaining_phases,
    requested,
)
from sluice.wire.params import RangeRetention, RetentionParams
from tests.fakes.clock import Clock

PARAMS = RetentionParams((RangeRetention(0, 10, 100, 5.0), RangeRetention(16, 20, 0)), 50, 2.0)


def for_seconds(priority: int, until: float):
    return (Phase(until, priority), *DEFAULT)


def priority(retention, now: float) -> int:
    return remaining_phases(retention, now)[0].priority


def test_the_range_of_a_blocks_first_token_applies():
    retentions = [requested(PARAMS, position, 24, 1.0) for position in range(0, 32, 4)]
    system, low, decode = for_seconds(100, 6.0), (Phase(inf, 0),), for_seconds(50, 3.0)
    assert retentions == [system, system, system, None, low, None, decode, decode]


def test_a_request_without_retention_requests_none():
    assert requested(RetentionParams(), 0, 24, 1.0) is None
    assert requested(RetentionParams(), 24, 24, 1.0) is None
    assert requested(RetentionParams(decode_seconds=3.0), 24, 24, 1.0) is None


times = st.integers(0, 20)


@st.composite
def schedules(draw):
    ends = sorted(draw(st.sets(st.integers(1, 20), max_size=4)))
    return tuple(Phase(end, draw(st.integers(0, 100))) for end in [*ends, inf])


@given(schedules(), schedules(), times)
def test_the_higher_priority_holds_at_every_time(a, b, now):
    assert priority(higher(a, b), now) == max(priority(a, now), priority(b, now))


@given(schedules(), schedules())
def test_consecutive_phases_have_different_priorities(a, b):
    priorities = [phase.priority for phase in higher(a, b)] if a != b else [1]
    assert all(before != after for before, after in pairwise(priorities))


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "pop", "wait"]), st.integers(0, 9), schedules())))
def test_the_order_is_by_priority_then_by_use(actions):
    """Compared with a model that sorts all blocks each time. When the end of a phase is applied, its block counts as
    used."""
    clock = Clock()
    clock.now = 0
    order, model, uses = EvictionOrder(clock), {}, 0
    for action, block, retention in actions:
        if action == "add" and block not in model:
            uses += 1
            model[block] = (retention, uses)
            order.add(block, retention)
        elif action == "remove" and block in model:
            del model[block]
            order.remove(block)
        elif action == "wait":
            clock.now += block
        elif action == "pop" and model:
            ended = [b for b, (r, _) in model.items() if r[0].until <= clock.now]
            for old in sorted(ended, key=lambda b: (model[b][0][0].until, model[b][1])):
                uses += 1
                model[old] = (remaining_phases(model[old][0], clock.now), uses)
            first = min(model, key=lambda b: (model[b][0][0].priority, model[b][1]))
            assert order.lowest() == model[first][0][0].priority
            assert order.pop() == first
            del model[first]
        assert sorted(order) == sorted(model)


def test_stale_ends_of_phases_are_removed():
    order = EvictionOrder(Clock())
    order.add(0, for_seconds(100, 1000.0))
    for _ in range(1000):
        order.remove(0)
        order.add(0, for_seconds(100, 1000.0))
    assert len(order._endings) <= COMPACT_AT + 3


def test_the_end_of_a_replaced_phase_has_no_effect():
    clock = Clock()
    order = EvictionOrder(clock)
    order.add(0, for_seconds(50, clock.now + 1))
    order.remove(0)
    order.add(0, DEFAULT)
    order.add(1, DEFAULT)
    clock.now += 2
    assert order.pop() == 0
