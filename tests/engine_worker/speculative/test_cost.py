import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.speculative.cost import EXPECTED, DraftCost


def learned(batch_size, plain, row, drafted=4, steps=100):
    cost = DraftCost()
    for _ in range(steps):
        cost.record(batch_size, 0, plain)
        cost.record(batch_size, drafted, plain + row * drafted)
    return cost


def test_it_is_learned_by_batch_size():
    cost = learned(4, 0.010, 0.001)
    assert cost.of(4) == pytest.approx(0.4, rel=0.01)
    assert cost.of(2) == 2 * EXPECTED


def test_a_step_that_was_held_up_counts_little():
    cost = learned(2, 0.010, 0.001)
    before = cost.of(2)
    cost.record(2, 4, 10.0)
    assert cost.of(2) - before < 0.1
    cost.record(2, 0, 10.0)
    cost.record(2, 4, 0.014)
    assert cost.of(2) > before / 2


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 64), st.floats(0, 100)), max_size=60))
def test_it_is_a_part_of_a_token(steps):
    cost = DraftCost()
    for batch_size, drafted, seconds in steps:
        cost.record(batch_size, drafted, seconds)
        assert 0 <= cost.of(batch_size) <= 1
