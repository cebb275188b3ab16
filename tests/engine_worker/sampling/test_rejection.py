"""Draft tokens from another distribution are accepted or replaced (Leviathan et al. 2023)."""

import math

import pytest
import torch

from engine_worker.runner.batch import to_device
from engine_worker.sampling.choose import TORCH
from engine_worker.sampling.filters import torch_thresholds
from engine_worker.sampling.noise import noise_key, random_bits, uniform
from engine_worker.sampling.sampler import SamplingPlan, sample
from engine_worker.step import Proposal
from sluice.wire.errors import ErrorCode
from tests.engine_worker.sampling.draws import draw, sampled, tensors
from tests.engine_worker.sampling.test_distribution import DRAWS, assert_follows, warped
from tests.fakes.graphs import Recording

VOCAB = 60
SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"min_p": 0.1},
    {"top_k": 5},
    {"top_p": 0.7},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.02, "temperature": 0.8},
]


def random_logits(seed: int, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def certain(token: int) -> torch.Tensor:
    """Logits of a draft that always proposes this token."""
    return torch.full((VOCAB,), -math.inf).index_fill_(0, torch.tensor(token), 0.0)


def proposal(token: int, logits: torch.Tensor, threshold: float | None = None) -> Proposal:
    return Proposal(token, logits.numpy(), threshold)


def drawn(
    logits: torch.Tensor, draft: torch.Tensor, threshold: float | None = None, **sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft tokens at DRAWS positions, sampled from the draft's distribution, and the resulting tokens."""
    tokens = draft.softmax(0).multinomial(DRAWS, replacement=True, generator=torch.Generator().manual_seed(8))
    draws = [
        draw(seed=7, position=i, proposal=proposal(token, draft, threshold), **sampling)
        for i, token in enumerate(tokens.tolist())
    ]
    return tokens, torch.tensor([each.token for each in sampled(logits[None], [0] * DRAWS, draws)])


@pytest.mark.quick(5)
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("draft", [random_logits(2), random_logits(3, 5.0)], ids=["flat", "peaked"])
def test_samples_follow_the_distribution_of_the_request(sampling, draft):
    logits = random_logits(1)
    proposed, tokens = drawn(logits, draft, **sampling)
    p, q = warped(logits[None].clone(), **sampling)[0], draft.softmax(0)
    assert_follows(torch.bincount(tokens, minlength=VOCAB), p)
    # Accepted, or sampled from the remainder, where p exceeds q; the rejected token is not among these.
    assert (proposed == tokens).double().mean().item() == pytest.approx(torch.minimum(p, q).sum().item(), abs=0.03)


@pytest.mark.parametrize("threshold", [0.01, 0.3, 1.0])
def test_a_threshold_alone_decides(threshold):
    logits, draft = random_logits(1), random_logits(2)
    p, q = logits.double().softmax(0), draft.double().softmax(0)
    passes = p / q >= threshold
    proposed, tokens = drawn(logits, draft, threshold)
    assert torch.equal(proposed == tokens, passes[proposed])
    rest = (p - q).clamp(min=0)
    expected = torch.where(passes, q, 0.0) + q[~passes].sum() * rest / rest.sum()
    assert_follows(torch.bincount(tokens, minlength=VOCAB), expected)


def test_acceptance_is_independent_of_the_noise_of_every_token():
    keys = torch.tensor([[noise_key(5, 0, position)] for position in range(20_000)])
    numbers = uniform(keys).squeeze(1)
    assert 0 < numbers.min() < numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.01)
    assert numbers.var().item() == pytest.approx(1 / 12, abs=0.002)
    for token in (0, 1, 59, 151_935):
        bits = random_bits(keys, torch.tensor([[token]])).squeeze(1).double()
        assert abs(torch.corrcoef(torch.stack([numbers, bits]))[0, 1].item()) < 0.03


@pytest.mark.parametrize("threshold", [None, 0.5, 1.0])
def test_greedy_is_greedy(threshold):
    """The core makes no proposals for greedy requests, and the rule would not change their output."""
    logits = random_logits(1)
    draws = [
        draw(temperature=1e-4, position=i, proposal=proposal(i, random_logits(2), threshold)) for i in range(VOCAB)
    ]
    greedy = draw(temperature=0.0, proposal=proposal(5, random_logits(2), threshold))
    results = sampled(logits[None], [0] * (VOCAB + 1), [*draws, greedy])
    assert {each.token for each in results} == {int(logits.argmax())}


@pytest.mark.parametrize("threshold", [None, 1e-6])
def test_banned_or_filtered_tokens_are_never_accepted(threshold):
    logits = random_logits(1)
    for banned in ({"bad_token_ids": (4,)}, {"banned": (4,)}, {"allowed_token_ids": (5, 6)}):
        (result,) = sampled(logits[None], [0], [draw(proposal=proposal(4, certain(4), threshold), **banned)])
        assert result.token != 4
    worst = int(logits.argmin())
    (result,) = sampled(logits[None], [0], [draw(top_k=3, proposal=proposal(worst, certain(worst), threshold))])
    assert result.token in logits.topk(3).indices.tolist()


def test_equal_distributions_accept_every_token():
    logits = random_logits(1)
    draws = [draw(seed=1, position=i, proposal=proposal(i % VOCAB, logits)) for i in range(500)]
    assert [each.token for each in sampled(logits[None], [0] * 500, draws)] == [i % VOCAB for i in range(500)]


def test_without_overlap_of_p_and_q_the_token_is_sampled_from_p():
    logits = random_logits(1)
    for i in range(50):
        plain = draw(seed=2, position=i, bad_token_ids=(9,))
        proposing = draw(seed=2, position=i, bad_token_ids=(9,), proposal=proposal(9, certain(9)))
        (expected, actual) = sampled(logits[None], [0, 0], [plain, proposing])
        assert actual == expected


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_an_invalid_proposal_is_rejected_in_favour_of_p(broken):
    """Engines reject such proposals earlier; here they must be harmless."""
    logits, draft = random_logits(1), random_logits(2)
    draft[3] = broken
    for i in range(20):
        draws = [draw(position=i), draw(position=i, proposal=proposal(3, draft, 0.1))]
        expected, actual = sampled(logits[None], [0, 0], draws)
        assert actual == expected


def test_a_draw_does_not_depend_on_its_batch():
    logits = torch.stack([random_logits(i) for i in range(6)])
    kinds = [
        {},
        {"temperature": 0.0},
        {"top_k": 7},
        {},
        {"top_p": 0.8, "temperature": 1.5},
        {"repetition_penalty": 1.5},
    ]
    draws = [
        draw(
            seed=i,
            position=i,
            prompt=[1, 2],
            output=[3, 4],
            logprobs=1,
            proposal=None if i % 3 == 0 else proposal(i, random_logits(9), 0.4 if i % 2 else None),
            **kind,
        )
        for i, kind in enumerate(kinds)
    ]
    alone = [sampled(logits[i : i + 1].clone(), [0], [each])[0].token for i, each in enumerate(draws)]
    assert [each.token for each in sampled(logits.clone(), range(6), draws)] == alone
    assert [each.token for each in sampled(logits.flip(0), range(6), draws[::-1])] == alone[::-1]


def test_only_a_row_with_nothing_to_sample_fails():
    logits = torch.stack([random_logits(i) for i in range(3)])
    logits[1, 5] = math.nan
    results = sampled(logits, [0, 1, 2], [draw(proposal=proposal(5, random_logits(9))) for _ in range(3)])
    assert [each.fault is None for each in results] == [True, False, True]
    assert results[1].fault.error_code is ErrorCode.INVALID_LOGITS


def test_nothing_waits_for_a_device(monkeypatch):
    monkeypatch.setattr("engine_worker.sampling.rejection.finite", lambda values: values.abs() < torch.inf)
    logits = torch.stack([random_logits(i) for i in range(2)])
    draws = [draw(proposal=proposal(5, random_logits(9))), draw(top_p=0.9, proposal=proposal(6, random_logits(8), 0.5))]
    plan = to_device(SamplingPlan.of(draws, [0, 1], *logits.shape, {}), logits.device)
    expected = sample(logits.clone(), plan)
    monkeypatch.setattr("engine_worker.sampling.noise.highest", lambda scores: scores.max(dim=1))
    with Recording() as recording:
        actual = sample(logits, plan, widen=False)
    assert recording.calls
    assert torch.equal(actual.tokens, expected.tokens)


def test_a_kernel_of_thresholds_changes_nothing():
    logits = torch.stack([random_logits(i) for i in range(20)])
    kinds = [{"top_p": 0.9}, {"top_k": 3}, {"top_k": 6, "top_p": 0.7, "temperature": 0.6}, {"min_p": 0.1}]
    draws = [draw(seed=i, proposal=proposal(i % 9, random_logits(i + 40)), **kinds[i % len(kinds)]) for i in range(20)]
    kernels = TORCH._replace(thresholds=torch_thresholds)
    actual, expected = tensors(logits.clone(), range(20), draws, kernels=kernels), tensors(logits, range(20), draws)
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.valid, expected.valid)


def test_a_filter_of_another_row_changes_nothing():
    """A filter switches all rows to the other computation of p; there are more rows than are computed at a time."""
    logits = torch.stack([random_logits(i) for i in range(30)])
    kinds = [{}, {"min_p": 0.1}, {"temperature": 0.6}]
    draws = [
        draw(seed=i, position=i, proposal=proposal(i, random_logits(i + 40)), **kinds[i % len(kinds)])
        for i in range(30)
    ]
    expected = [each.token for each in sampled(logits.clone(), range(30), draws)]
    filtered = draw(top_k=5, proposal=proposal(1, random_logits(9)))
    results = sampled(logits.clone(), [*range(30), 0], [*draws, filtered])
    assert [each.token for each in results[:30]] == expected
