from hypothesis import given
from hypothesis import strategies as st

from engine_worker.speculative.pace import FIRST, LONGEST_PAUSE, Pace


def test_what_is_accepted_grows():
    pace = Pace(20)
    lengths = []
    for _ in range(5):
        lengths.append(pace.next_length(1))
        pace.record(lengths[-1], lengths[-1])
    assert lengths == [FIRST, 8, 16, 20, 20]


def test_half_a_draft_sets_the_next_length():
    pace = Pace(20)
    pace.next_length(2)
    pace.record(8, 3)
    assert pace.next_length(1) == 4


def test_in_a_batch_a_draft_has_to_bring_more():
    pace = Pace(20)
    assert pace.next_length(8) == 4
    pace.record(4, 4)
    assert pace.next_length(8) == 8
    pace.record(8, 3)
    assert [pace.next_length(8) for _ in range(2)] == [0, 4]


def test_pauses_grow_to_a_limit_and_shrink_with_a_success():
    pace, pauses = Pace(20), []
    for _ in range(9):
        pace.record(1, 0)
        pauses.append(0)
        while not pace.next_length(1):
            pauses[-1] += 1
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    pace.record(1, 1)
    pace.record(1, 0)
    assert [pace.next_length(1) for _ in range(33)] == [0] * 32 + [1]


@given(
    most=st.integers(0, 64),
    rounds=st.lists(st.tuples(st.integers(1, 64), st.integers(0, 64), st.integers(1, 99)), max_size=40),
)
def test_never_more_than_asked_and_never_silent_for_long(most, rounds):
    pace = Pace(most)
    for drafted, accepted, batch in rounds:
        assert pace.next_length(batch) <= most
        pace.record(drafted, min(drafted, accepted))
    assert most == 0 or any(pace.next_length(1) for _ in range(LONGEST_PAUSE + 1))
