import math

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from sluice.wire.errors import ErrorCode
from sluice.wire.params import derive_seed
from tests.engine_worker.sampling.draws import draw, edit, sampled, tensors

VOCAB = 700


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(5)) * 3


def tokens(logits, draws, rows=None):
    # A copy, since sampling may change the logits in place.
    drawn = sampled(logits.clone(), list(range(len(draws))) if rows is None else rows, draws)
    assert all(d.fault is None for d in drawn)
    return [d.token for d in drawn]


KINDS = [
    {},
    {"min_p": 0.02},
    {"top_k": 30, "top_p": 0.9},
    {"top_p": 0.999, "temperature": 2.0},
    {"temperature": 0.0},
    {"repetition_penalty": 1.3},
    {"logit_bias": ((3, 2.0),), "logprobs": 2},
    {"allowed_token_ids": tuple(range(50, 90))},
]


def test_greedy_chooses_the_best_and_the_lowest_id_of_equals():
    logits = torch.zeros(40, VOCAB)
    logits[torch.arange(40), torch.arange(40) * 17] = 1.0
    logits[torch.arange(40), torch.arange(40) * 17 + 1] = 1.0
    assert tokens(logits, [draw(temperature=0.0)] * 40) == [17 * i for i in range(40)]


def test_a_draw_does_not_depend_on_its_batch(logits):
    """Every kind of draw: alone, in a batch, in another order, and with a shared row."""
    draws = [draw(seed=i, position=i, prompt=[1, 2], output=[3, 4], **kind) for i, kind in enumerate(KINDS)]
    alone = [tokens(logits[i : i + 1], [d])[0] for i, d in enumerate(draws)]
    assert tokens(logits, draws) == alone
    assert tokens(logits.flip(0), draws[::-1]) == alone[::-1]
    assert tokens(logits, draws * 3, [*range(8)] * 3) == alone * 3


@pytest.mark.parametrize("kind", KINDS[:4], ids=str)
def test_sequences_differ_and_equal_their_derived_seed(logits, kind):
    draws = [draw(seed=11, sequence=i, position=at, **kind) for i in range(4) for at in range(12)]
    sampled = tokens(logits, draws, [0] * len(draws))
    sequences = [sampled[i : i + 12] for i in range(0, len(sampled), 12)]
    assert len({tuple(sequence) for sequence in sequences}) == 4
    single = [draw(seed=derive_seed(11, i), position=at, **kind) for i in range(4) for at in range(12)]
    assert tokens(logits, single, [0] * len(single)) == sampled


def test_noise_belongs_to_token_ids(logits):
    """Banning a token that was not chosen changes nothing, although it changes the ranks of others."""
    for position in range(30):
        free = tokens(logits[:1], [draw(seed=1, position=position)])[0]
        best = [token for token in logits[0].topk(5).indices.tolist() if token != free]
        banned = draw(seed=1, position=position, bad_token_ids=tuple(best))
        limited = draw(seed=1, position=position, top_k=VOCAB)
        assert tokens(logits[:1], [banned]) == tokens(logits[:1], [limited]) == [free]


def test_bans(logits):
    best = logits[0].argmax().item()
    for banned in ({"banned": (best,)}, {"bad_token_ids": (best, VOCAB + 5)}):
        assert tokens(logits[:1], [draw(temperature=0.0, **banned)]) == [logits[0].topk(2).indices[1].item()]


def test_allowed_ids(logits):
    allowed = (5, 77, 300, VOCAB + 1)
    expected = max(allowed[:3], key=lambda token: logits[0, token].item())
    assert tokens(logits[:1], [draw(temperature=0.0, allowed_token_ids=allowed)]) == [expected]
    drawn = tokens(logits, [draw(position=i, temperature=5.0, allowed_token_ids=allowed) for i in range(99)], [0] * 99)
    assert set(drawn) == set(allowed[:3])


def test_logit_bias(logits):
    scores = logits[:2].clone()
    edit(scores, [draw(logit_bias=((3, 2.5), (600, -100.0), (VOCAB, 1.0))), draw()])
    expected = logits[:2].clone()
    expected[0, 3] += 2.5
    expected[0, 600] -= 100.0
    assert torch.equal(scores, expected)


def test_repetition_penalty_equals_that_of_transformers(logits):
    prompt, output = [5, 9, 9, 100], [100, 3]
    scores = logits[:1].clone()
    edit(scores, [draw(repetition_penalty=1.7, prompt=prompt, output=output)])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits[:1].clone())
    torch.testing.assert_close(scores, expected)


def test_presence_and_frequency_penalties_count_the_output(logits):
    scores = logits[:1].clone()
    edit(scores, [draw(presence_penalty=0.5, frequency_penalty=-0.25, prompt=[1, 2], output=[2, 7, 2])])
    expected = logits[:1].clone()
    expected[0, 2] -= 0.5 - 0.25 * 2
    expected[0, 7] -= 0.5 - 0.25
    torch.testing.assert_close(scores, expected)


def test_penalties_come_after_bias_and_bans(logits):
    scores = logits[:1].clone()
    edit(scores, [draw(repetition_penalty=2.0, prompt=[4, 6], logit_bias=((4, 50.0),), bad_token_ids=(6,))])
    assert scores[0, 4].item() == pytest.approx((logits[0, 4].item() + 50.0) / 2)
    assert scores[0, 6].item() == -math.inf


def test_logits_that_are_needed_again_are_not_modified(logits):
    before = logits.clone()
    draws = [draw(prompt=[1], output=[2], **kind) for kind in KINDS]
    tokens(logits, draws)
    assert torch.equal(logits, before)
    tensors(logits, range(4), [draw(repetition_penalty=2.0, prompt=[1], seed=i) for i in range(4)], widen=False)
    assert torch.equal(logits, before)


BROKEN = {
    "nan": {},
    "nan, filtered": {"top_k": 5},
    "nan, greedy": {"temperature": 0.0},
    "nan, with bans": {"bad_token_ids": (3,)},
    "masked": {"allowed_token_ids": (3,), "bad_token_ids": (3,)},
    "masked, greedy": {"allowed_token_ids": (3,), "bad_token_ids": (3,), "temperature": 0.0},
    "masked, filtered": {"allowed_token_ids": (3,), "bad_token_ids": (3,), "top_p": 0.5},
    "out of range": {"allowed_token_ids": (VOCAB,)},
}


@pytest.mark.parametrize("case", BROKEN)
def test_only_a_row_with_nothing_to_sample_fails(logits, case):
    sampling = BROKEN[case]
    draws = [draw(seed=i, logprobs=1, **sampling) for i in range(3)]
    other_options = {key: value for key, value in sampling.items() if not key.endswith("token_ids")}
    draws[0], draws[2] = (draw(seed=i, logprobs=1, **other_options) for i in (0, 2))
    expected = sampled(logits[:3], [0, 1, 2], draws)
    if case.startswith("nan"):
        logits[1, 123] = math.nan
    drawn = sampled(logits[:3], [0, 1, 2], draws)
    code = ErrorCode.INVALID_LOGITS if case.startswith("nan") else ErrorCode.NOTHING_TO_SAMPLE
    assert drawn[1].fault.error_code is code
    assert (drawn[0], drawn[2]) == (expected[0], expected[2])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_logprobs_are_the_models_own(logits, kind):
    kind = {key: value for key, value in kind.items() if key != "logprobs"}
    draws = [draw(seed=i, prompt=[1], output=[2], logprobs=i, **kind) for i in range(8)]
    exact = logits.double().log_softmax(dim=-1)
    for i, drawn in enumerate(sampled(logits, list(range(8)), draws)):
        row = exact[i]
        assert drawn.logprob.logprob == pytest.approx(row[drawn.token].item(), abs=1e-5)
        assert drawn.logprob.rank == 1 + int((row > row[drawn.token]).sum())
        best = row.topk(i)
        assert [token for token, _ in drawn.logprob.top] == best.indices.tolist()
        assert [value for _, value in drawn.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_only_draws_that_request_logprobs_get_them(logits):
    drawn = sampled(logits, [0, 1], [draw(logprobs=0), draw()])
    assert drawn[0].logprob.top == []
    assert drawn[1].logprob is None


def test_ties_are_in_the_order_of_ids():
    logits = torch.zeros(1, 8)
    logits[0, 6] = 1.0
    drawn = sampled(logits, [0], [draw(temperature=0.0, logprobs=8)])[0]
    assert [token for token, _ in drawn.logprob.top] == [6, 0, 1, 2, 3, 4, 5, 7]
