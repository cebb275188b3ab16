"""The candidates of beams: the most likely tokens after all edits, in steps with sampled draws."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.sampling.choose import _most_likely_keys, most_likely
from sluice.wire.errors import ErrorCode
from tests.engine_worker.sampling.draws import draw, sampled

VOCAB = 300


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5)) * 3


def test_candidates_are_the_best_of_the_normalized_logits(logits):
    draws = [draw(candidates=6, temperature=0.0), draw(seed=1, logprobs=2), draw(candidates=4), draw(seed=2, top_k=5)]
    results = sampled(logits.clone(), [0, 1, 2, 3], draws)
    for row, count in ((0, 6), (2, 4)):
        values, ids = logits[row].log_softmax(0).topk(count)
        assert [token for token, _ in results[row].best] == ids.tolist()
        assert [logprob for _, logprob in results[row].best] == pytest.approx(values.tolist(), abs=1e-5)
        assert not results[row].has_token
        assert results[row].logprob is None
    alone = sampled(logits[[1, 3]].clone(), [0, 1], [draws[1], draws[3]])
    assert [results[1], results[3]] == alone


def test_edits_come_before_the_normalization(logits):
    best = int(logits[0].argmax())
    with_edits = draw(candidates=5, banned=(best,), logit_bias=((7, 20.0),))
    (result,) = sampled(logits[:1].clone(), [0], [with_edits])
    edited = logits[0].clone()
    edited[7] += 20.0
    edited[best] = -math.inf
    values, ids = edited.log_softmax(0).topk(5)
    assert [token for token, _ in result.best] == ids.tolist()
    assert [logprob for _, logprob in result.best] == pytest.approx(values.tolist(), abs=1e-5)


def test_impossible_tokens_are_excluded(logits):
    (result,) = sampled(logits[:1].clone(), [0], [draw(candidates=8, allowed_token_ids=(3, 9, 12))])
    assert {token for token, _ in result.best} == {3, 9, 12}
    assert sum(math.exp(logprob) for _, logprob in result.best) == pytest.approx(1.0)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_broken_row_is_a_fault(logits, broken):
    logits[0] = broken
    broken_one, intact = sampled(logits.clone(), [0, 1], [draw(candidates=4), draw(candidates=4)])
    assert broken_one.fault.code == ErrorCode.INVALID_LOGITS.name
    assert len(intact.best) == 4


def test_more_candidates_than_the_vocabulary(logits):
    (result,) = sampled(logits[:1].clone(), [0], [draw(candidates=VOCAB + 5)])
    assert len(result.best) == VOCAB


def test_ties_are_in_the_order_of_ids_for_any_requests_of_other_draws():
    scores = torch.zeros(2, VOCAB)
    scores[:, 200:210] = torch.tensor([1.0, -0.5, 1.0, 1.0, 0.0, -torch.inf, 1.0, 2.0, 1.0, 1.0])
    ties = [207, 200, 202, 203, 206, 208, 209, 0, 1]
    (alone,) = sampled(scores[:1].clone(), [0], [draw(candidates=9)])
    together, _ = sampled(scores.clone(), [0, 1], [draw(candidates=9), draw(candidates=30)])
    assert [token for token, _ in alone.best] == ties
    assert together == alone


@given(st.data())
def test_the_order_is_that_of_all_scores_sorted(data):
    values = st.sampled_from([-torch.inf, -2.5, -1.0, 0.0, 0.5, 3.0, 3.5])
    rows = data.draw(st.lists(st.lists(values, min_size=9, max_size=9), min_size=1, max_size=4))
    count = data.draw(st.integers(1, 9))
    for find in (most_likely, _most_likely_keys):
        for row, candidates in zip(rows, find(torch.tensor(rows), count).tolist(), strict=True):
            expected = sorted(range(9), key=lambda i: (-row[i], i))[:count]
            possible = [i for i in expected if row[i] > -torch.inf]
            assert candidates[: len(possible)] == possible
