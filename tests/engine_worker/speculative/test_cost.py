import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.speculative.cost import FIRST, REFRESH, Cost, DraftCost


def learned(batch_size, plain, step, token, after=0.0, rounds=200):
    """The cost learned from steps with drafts of 1 to 8 tokens, each followed by two plain steps. `plain`, `step`,
    `token`, `after`: seconds of a plain step, and in addition for drafts, per draft token, and after a step with
    drafts."""
    cost = DraftCost()
    for _ in range(FIRST):
        cost.record(batch_size, 0, plain)
    for i in range(rounds):
        drafted = 1 + i % 8
        cost.record(batch_size, drafted, plain + step + token * drafted)
        cost.record(batch_size, 0, plain + after)
        cost.record(batch_size, 0, plain)
    return cost


def test_nothing_is_drafted_before_plain_steps_are_known():
    cost = DraftCost()
    for _ in range(FIRST):
        assert cost.of(3) is None
        cost.record(3, 0, 0.01)
    assert cost.of(3) is not None
    assert cost.of(2) is None


def test_both_parts_of_the_cost_are_learned():
    cost = learned(4, 0.010, step=0.002, token=0.0005).of(4)
    assert cost == Cost(pytest.approx(0.8, rel=0.1), pytest.approx(0.2, rel=0.1))


def test_the_cost_includes_the_next_plain_step():
    without, with_excess = (learned(2, 0.010, 0.002, 0.0005, after).of(2) for after in (0.0, 0.004))
    assert with_excess.token == pytest.approx(without.token, rel=0.01)
    # The step after one with drafts is always a plain step here.
    assert with_excess.step - without.step == pytest.approx(0.8, rel=0.1)


def test_a_delayed_step_has_little_weight():
    cost = learned(2, 0.010, 0.002, 0.0005)
    before = cost.of(2)
    cost.record(2, 4, 10.0)
    assert cost.of(2).step + 4 * cost.of(2).token < 3 * (before.step + 4 * before.token)
    cost = learned(2, 0.010, 0.002, 0.0005)
    cost.record(2, 0, 10.0)
    cost.record(2, 4, 0.014)
    assert cost.of(2).step > before.step / 2


def test_plain_steps_are_measured_periodically():
    cost = learned(2, 0.010, 0.002, 0.0005)
    count = 0
    while cost.of(2):
        cost.record(2, 4, 0.014)
        count += 1
    assert count == REFRESH
    # The first plain step after drafts does not count: its shape differs from that of the previous step.
    cost.record(2, 0, 0.012)
    assert cost.of(2) is None
    cost.record(2, 0, 0.010)
    assert cost.of(2) is not None


def test_high_costs_are_forgotten():
    cost = learned(8, 0.010, 0.02, 0.01)
    before = cost.of(8)
    for _ in range(2000):
        cost.record(8, 0, 0.010)
    assert cost.of(8).step + 4 * cost.of(8).token < (before.step + 4 * before.token) / 2


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 64), st.floats(0, 100)), max_size=200))
def test_costs_are_bounded_for_any_durations(steps):
    cost = DraftCost()
    for batch_size, drafted, seconds in steps:
        cost.record(batch_size, drafted, seconds)
        costs = cost.of(batch_size)
        if costs is not None:
            assert costs.step >= 0
            assert 0 < costs.token <= 1
