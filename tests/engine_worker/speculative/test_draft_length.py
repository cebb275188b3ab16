import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.speculative.draft_length import MAX_ACCURACY, DraftLength


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
