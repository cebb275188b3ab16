import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.speculative.pace import FIRST, LONGEST_PAUSE, Pace


def test_what_is_accepted_grows():
    pace = Pace(20)
    lengths = []
    for _ in range(5):
        lengths.append(pace.next_length(0.1))
        pace.record(lengths[-1], lengths[-1])
    assert lengths == [FIRST, 8, 16, 20, 20]


def test_half_a_draft_sets_the_next_length():
    pace = Pace(20)
    pace.next_length(0.1)
    pace.record(8, 3)
    assert pace.next_length(0.1) == 4


def test_pauses_grow_to_a_limit_and_shrink_with_a_success():
    pace, pauses = Pace(20), []
    pace.next_length(1.0)
    for _ in range(9):
        pace.record(4, 0)
        pauses.append(0)
        while not pace.next_length(1.0):
            pauses[-1] += 1
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    pace.next_length(0.1)
    pace.record(1, 1)
    pace.next_length(1.0)
    pace.record(1, 0)
    assert [pace.next_length(1.0) for _ in range(33)] == [0] * 32 + [1]


def test_one_long_draft_does_not_outweigh_what_follows():
    pace = Pace(64)
    pace.next_length(1.0)
    pace.record(64, 0)
    assert pace.paused
    assert [pace.next_length(0.1) for _ in range(2)] == [0, 1]
    pace.record(1, 1)
    assert pace.next_length(0.1) == 2


@pytest.mark.parametrize(("cost", "drafts"), [(0.05, 200), (0.3, 200), (0.7, 60), (1.0, 20)])
def test_it_drafts_where_one_token_in_two_is_accepted_and_costs_less(cost, drafts):
    pace, count = Pace(1), 0
    for _ in range(200):
        if pace.next_length(cost):
            count += 1
            pace.record(1, count % 2)
    assert count <= drafts if cost > 0.5 else count == drafts


@given(
    most=st.integers(0, 64),
    rounds=st.lists(st.tuples(st.integers(1, 64), st.integers(0, 64), st.floats(0.0, 1.0)), max_size=40),
)
def test_never_more_than_asked_and_never_silent_for_long(most, rounds):
    pace = Pace(most)
    for drafted, accepted, cost in rounds:
        assert pace.next_length(cost) <= most
        pace.record(drafted, min(drafted, accepted))
    assert most == 0 or any(pace.next_length(1.0) for _ in range(LONGEST_PAUSE + 1))
