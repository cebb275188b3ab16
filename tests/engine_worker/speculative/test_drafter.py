"""Drafters, and the lengths of their drafts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.speculative.drafter import MAX_ACCURACY, Drafter, DraftLength, begin_lookup

ROOM, COST = 100, 0.01


def make(prompt, max_tokens, expected=()) -> Drafter:
    return Drafter(begin_lookup(prompt, expected), max_tokens, expected)


def drafting(drafter, output):
    """The next draft that is not empty: the pace may skip some steps."""
    for _ in range(100):
        draft = drafter.propose(output, ROOM, COST)
        if draft:
            return list(draft)
    return []


def test_the_expected_output_is_used_first():
    drafter = make([1, 2, 3, 1, 2], max_tokens=3, expected=[7, 8, 9, 10])
    assert list(drafter.propose([], ROOM, COST)) == [7, 8, 9]
    assert list(drafter.propose([7], ROOM, COST)) == [8, 9, 10]


def test_after_a_difference_the_expected_output_is_looked_up():
    drafter = make([0], max_tokens=2, expected=[5, 6, 7, 8, 9])
    assert list(drafter.propose([4], ROOM, COST)) == []
    assert list(drafter.propose([4, 6, 7], ROOM, COST)) == [8, 9]


def test_the_expected_output_is_not_followed_after_a_difference():
    drafter = make([0], max_tokens=2, expected=[5, 6, 7, 8])
    drafter.propose([4], ROOM, COST)
    assert list(drafter.propose([4, 9], ROOM, COST)) == []


def test_the_prompt_is_looked_up():
    drafter = make([1, 2, 3, 4, 5, 1, 2], max_tokens=3)
    assert list(drafter.propose([3], ROOM, COST)) == [4, 5, 1]


def test_room_limits_a_draft():
    drafter = make([0], max_tokens=8, expected=[*range(20)])
    assert list(drafter.propose([], 2, COST)) == [0, 1]
    assert list(drafter.propose([], 0, COST)) == []


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    expected=st.lists(st.integers(0, 2), max_size=20),
    output=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    data=st.data(),
)
def test_a_resumed_sequence_has_the_same_drafts(prompt, expected, output, data):
    """Drafts are the same if the output is added step by step or all together; only the pace may differ."""
    stepwise = make(prompt, 4, expected)
    at = 0
    while at < len(output):
        stepwise.propose(output[:at], ROOM, COST)
        at += data.draw(st.integers(1, 5))
    assert drafting(stepwise, output) == drafting(make(prompt, 4, expected), output)


def test_predictions_that_were_not_drafted_change_the_pace():
    drafter, output = make([1, 2, 3] * 5, max_tokens=4), []
    while not drafter.pays(0.9):
        assert not drafter.propose(output, 0, 0.9)
        output.append(1 + len(output) % 3)
    assert 5 < len(output) < 20
    assert list(drafter.propose(output, ROOM, 0.9)) == [1 + len(output) % 3]
    for count in range(20):
        # Continuations that do not occur again.
        output += [100 + count, 200 + count, 300 + count, 100 + count, 200 + count]
        assert list(drafter.propose(output, 0, COST)) == []
        output.append(400 + count)
    drafter.propose(output, 0, COST)
    assert not drafter.pays(0.5)


def pace_after(*drafts, max_tokens=20, accuracy=0.5):
    pace = DraftLength(max_tokens, accuracy)
    for drafted, accepted in drafts:
        pace.record(drafted, accepted)
    return pace


def test_accepted_tokens_make_drafts_longer():
    lengths = [pace_after(*[(4, 4)] * count).length(0.1) for count in range(4)]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == 20


def test_rejected_tokens_end_drafts():
    assert pace_after(*[(1, 0)] * 30).length(0.1) == 0
    assert pace_after(*[(1, 0)] * 30, *[(1, 1)] * 3).length(0.1) > 0


@pytest.mark.parametrize(("cost", "lengths"), [(0.1, [2, 3, 21]), (0.5, [0, 1, 6]), (0.95, [0, 0, 0])])
def test_a_draft_ends_where_the_next_token_costs_more_than_its_probability(cost, lengths):
    assert [DraftLength(64, accuracy).length(cost) for accuracy in (0.4, 0.5 + 1e-9, 0.9)] == lengths


@given(st.floats(0.01, MAX_ACCURACY), st.integers(1, 64))
def test_the_expected_number_of_accepted_tokens(accuracy, drafted):
    expected = sum(accuracy**count for count in range(1, drafted + 1))
    assert DraftLength(64, accuracy).expects(drafted) == pytest.approx(expected)


@given(st.integers(0, 64), st.lists(st.tuples(st.integers(1, 64), st.integers(0, 64)), max_size=60), st.floats(0.01, 1))
def test_a_draft_never_exceeds_max_tokens(max_tokens, drafts, cost):
    pace = pace_after(*[(drafted, min(drafted, accepted)) for drafted, accepted in drafts], max_tokens=max_tokens)
    assert 0 <= pace.accuracy <= MAX_ACCURACY
    assert 0 <= pace.length(cost) <= max_tokens
