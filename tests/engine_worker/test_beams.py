"""The rules of beam search. tests/parity/test_beams.py compares them with transformers."""

import math

import pytest

from engine_worker.beams import BeamSearch, Child
from sluice.wire.errors import FinishReason
from sluice.wire.params import BeamSearchParams, StopParams

EOS, STOP = 0, 9


def search_of(width: int = 2, max_tokens: int = 10, alternatives: int = 0, **params) -> BeamSearch:
    stopping = StopParams(max_tokens, eos_token_ids=(EOS,), stop_token_ids=(STOP,))
    return BeamSearch(BeamSearchParams(width, **params), stopping, alternatives)


def tokens_of(search: BeamSearch) -> list[list[int]]:
    return [[step.token for step in beam.path.steps()] for beam in search.finished]


def test_the_best_candidates_continue_in_order():
    search = search_of()
    assert search.advance([[(4, -0.1), (5, -1.0), (6, -2.0)]]) == [Child(0, 4), Child(0, 5)]
    assert search.advance([[(1, -3.0), (2, -4.0)], [(1, -0.5), (2, -0.7)]]) == [Child(1, 1), Child(1, 2)]


def test_an_end_among_the_best_finishes_and_the_next_candidate_replaces_it():
    search = search_of()
    assert search.advance([[(EOS, -0.1), (5, -1.0), (6, -2.0)]]) == [Child(0, 5), Child(0, 6)]
    assert tokens_of(search) == [[EOS]]
    assert search.finished[0].reason is FinishReason.EOS


def test_an_end_after_the_best_candidates_does_not_count():
    search = search_of()
    assert search.advance([[(5, -1.0), (6, -2.0), (STOP, -2.1), (EOS, -2.2)]]) == [Child(0, 5), Child(0, 6)]
    assert search.finished == []


@pytest.mark.parametrize("impossible", [-math.inf, math.nan])
def test_impossible_tokens_never_become_beams(impossible):
    search = search_of(width=3)
    assert search.advance([[(4, -0.5), (5, impossible), (6, impossible)]]) == [Child(0, 4)]
    # With a single beam there are fewer candidates than `width`; later there may be enough again.
    assert search.advance([[(4, -0.5), (5, -1.0), (6, impossible)]]) == [Child(0, 4), Child(0, 5)]


def test_without_possible_candidates_the_search_ends():
    search = search_of(width=2)
    search.advance([[(EOS, -0.1), (5, -1.0)]])
    assert search.advance([[(5, -math.inf)]]) == []
    assert search.ended
    assert tokens_of(search) == [[EOS]]


def test_at_max_tokens_the_best_candidates_finish():
    search = search_of(max_tokens=2)
    search.advance([[(4, -0.1), (5, -1.0)]])
    assert search.advance([[(EOS, -0.2), (7, -0.3)], [(1, -0.1), (2, -4.0)]]) == []
    assert tokens_of(search) == [[4, EOS], [4, 7]]
    assert [beam.reason for beam in search.finished] == [FinishReason.EOS, FinishReason.LENGTH]
    assert [beam.score for beam in search.finished] == pytest.approx([-0.15, -0.2])


@pytest.mark.parametrize(("stop", "rounds"), [({"early_stopping": True}, 2), ({}, 3), ({"exhaustive": True}, 4)])
def test_when_a_search_ends(stop, rounds):
    following = [
        [[(EOS, -1.0), (4, -1.1), (5, -1.2)]],
        # Then two beams have finished, with scores of -0.6 and -1.0; the score of the best live beam is -0.625.
        [[(EOS, -0.1), (6, -0.15)], [(7, -0.2), (8, -9.0)]],
        # Then its score is -1.08, or -0.325 at max_tokens.
        [[(4, -2.0), (5, -2.5)], [(4, -5.0), (5, -6.0)]],
        # Then its score is -1.125 at max_tokens.
        [[(4, -8.0), (5, -8.0)], [(4, -8.0), (5, -8.0)]],
    ]
    search = search_of(max_tokens=10, **stop)
    for best in following[:rounds]:
        assert not search.ended
        search.advance(best)
    assert search.ended
    assert tokens_of(search) == [[4, EOS], [EOS]]


def test_the_length_penalty_prefers_longer_outputs():
    for penalty, best in ((0.0, [EOS]), (2.0, [4, EOS])):
        search = search_of(length_penalty=penalty, max_tokens=2)
        search.advance([[(4, -0.5), (EOS, -0.6), (5, -9.0)]])
        search.advance([[(EOS, -0.4), (7, -5.0)], [(7, -9.0), (8, -9.5)]])
        assert tokens_of(search)[0] == best


def test_diversity_prefers_other_beams_without_changing_sums():
    plain, diverse = search_of(max_tokens=2), search_of(max_tokens=2, diversity_rate=1.0)
    for search in (plain, diverse):
        search.advance([[(4, -0.1), (5, -1.0)]])
        search.advance([[(1, -0.5), (2, -0.6)], [(1, -0.5), (2, -3.0)]])
    assert tokens_of(plain) == [[4, 1], [4, 2]]
    assert sorted(tokens_of(diverse)) == [[4, 1], [5, 1]]
    totals = {beam.path.token: beam.path.total for beam in diverse.finished if beam.path.parent.token == 5}
    assert totals == pytest.approx({1: -1.5})


def test_each_beam_delivers_enough_candidates():
    assert search_of(width=4).num_candidates == 8
    many = StopParams(5, eos_token_ids=tuple(range(20)))
    assert BeamSearch(BeamSearchParams(4), many).num_candidates == 24
    assert search_of(width=2, alternatives=15).num_candidates == 15


def test_alternatives_and_ranks_are_reported():
    search = search_of(max_tokens=1, alternatives=2)
    search.advance([[(4, -0.1), (5, -1.0), (6, -2.0)]])
    best, second = (beam.path.logprob for beam in search.finished)
    assert (best.rank, second.rank) == (1, 2)
    assert second.logprob == -1.0
    assert best.top == second.top == [(4, -0.1), (5, -1.0)]
