import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.speculative.cost import FIRST, REFRESH, Cost, DraftCost


def learned(batch_size, plain, step, token, behind=0.0, rounds=200):
    """From steps that take so many seconds; drafts of 1 to 8 tokens, each followed by two steps without."""
    cost = DraftCost()
    for _ in range(FIRST):
        cost.record(batch_size, 0, plain)
    for i in range(rounds):
        drafted = 1 + i % 8
        cost.record(batch_size, drafted, plain + step + token * drafted)
        cost.record(batch_size, 0, plain + behind)
        cost.record(batch_size, 0, plain)
    return cost


def test_nothing_is_drafted_before_plain_steps_are_known():
    cost = DraftCost()
    for _ in range(FIRST):
        assert cost.of(3) is None
        cost.record(3, 0, 0.01)
    assert cost.of(3) is not None
    assert cost.of(2) is None


def test_both_parts_are_learned():
    cost = learned(4, 0.010, step=0.002, token=0.0005).of(4)
    assert cost == Cost(pytest.approx(0.8, rel=0.1), pytest.approx(0.2, rel=0.1))


def test_the_step_behind_is_part_of_the_cost():
    without, having = (learned(2, 0.010, 0.002, 0.0005, behind).of(2) for behind in (0.0, 0.004))
    assert having.token == pytest.approx(without.token, rel=0.01)
    # Every second step that is recorded as such has no drafts.
    assert having.step - without.step == pytest.approx(0.8, rel=0.1)


def test_a_step_that_was_held_up_counts_little():
    cost = learned(2, 0.010, 0.002, 0.0005)
    before = cost.of(2)
    cost.record(2, 4, 10.0)
    assert cost.of(2).step + 4 * cost.of(2).token < 3 * (before.step + 4 * before.token)
    cost = learned(2, 0.010, 0.002, 0.0005)
    cost.record(2, 0, 10.0)
    cost.record(2, 4, 0.014)
    assert cost.of(2).step > before.step / 2


def test_now_and_then_a_step_has_no_drafts():
    cost = learned(2, 0.010, 0.002, 0.0005)
    count = 0
    while cost.of(2):
        cost.record(2, 4, 0.014)
        count += 1
    assert count == REFRESH
    # The first one has the shape of the ones before.
    cost.record(2, 0, 0.012)
    assert cost.of(2) is None
    cost.record(2, 0, 0.010)
    assert cost.of(2) is not None


def test_what_was_too_expensive_is_forgotten():
    cost = learned(8, 0.010, 0.02, 0.01)
    before = cost.of(8)
    for _ in range(2000):
        cost.record(8, 0, 0.010)
    assert cost.of(8).step + 4 * cost.of(8).token < (before.step + 4 * before.token) / 2


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 64), st.floats(0, 100)), max_size=200))
def test_it_is_bounded_whatever_the_times(steps):
    cost = DraftCost()
    for batch_size, drafted, seconds in steps:
        cost.record(batch_size, drafted, seconds)
        found = cost.of(batch_size)
        if found is not None:
            assert found.step >= 0
            assert 0 < found.token <= 1
