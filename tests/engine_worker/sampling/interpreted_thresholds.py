"""Tests the thresholds kernel with Triton's interpreter, on a CPU; see `test_interpreted`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.runner import fusing
from engine_worker.sampling import thresholds as kernel
from engine_worker.sampling.choose import SamplingKernels
from engine_worker.sampling.filters import Filters, torch_thresholds
from engine_worker.sampling.noise import torch_gumbel_max
from sluice.wire.params import SamplingParams
from tests.engine_worker.sampling.draws import draw, tensors
from tests.examples import examples

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")]
KERNELS = SamplingKernels(torch_gumbel_max, kernel.triton_thresholds)
SMALL = 1 << 6
"""In place of WIDTH. The interpreter takes about as long for many scores at a time as for few."""
ROUNDING = 1e-4
"""Relative error of top-p: weights are exponentials in float32 of scores over temperature, which reach 1,000."""
CPU = torch.device("cpu")
LIMITS = [{"top_p": 0.9}, {"top_k": 5}, {"top_k": 70, "top_p": 0.8}, {"top_p": 0.95, "min_p": 0.02}]

ROW = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 0.3, 1.0, 1.3, 2.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 7, 50, 63, 64, 65, 200, 5000]),
        "top_p": st.sampled_from([1.0, 0.999, 0.95, 0.9, 0.5, 0.05, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
        "kind": st.sampled_from(["flat", "peaked", "rounded", "few values", "equal", "banned", "both zeros", "wide"]),
        "seed": st.integers(0, 999),
    }
)


def scores_of(kind: str, size: int, generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(size, generator=generator)
    match kind:
        case "flat":
            return 0.5 * normal
        case "peaked":
            return 8 * normal + 40 * (torch.rand(size, generator=generator) < 0.02)
        case "rounded":
            return (3 * normal).bfloat16().float()
        case "few values":
            return (2 * normal).round()
        case "equal":
            return torch.full((size,), 3.25)
        case "banned":
            return normal.masked_fill(torch.rand(size, generator=generator) < 0.9, -torch.inf)
        case "both zeros":
            return torch.where(normal < 0, -0.0, 0.0) + normal.mul(3).round().clamp(max=1).abs() * torch.sign(normal)
        case _:
            return normal.sign() * torch.exp(20 * torch.randn(size, generator=generator))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(kernel, "WIDTH", SMALL)


def kept(function, scores, temperature, filters):
    """Which tokens pass, [N, vocab] bool, and which rows are valid, [N] bool."""
    lowest, valid = function(scores, temperature, filters)
    return scores / temperature >= lowest, valid


@examples(25)
@given(rows=st.lists(ROW, min_size=1, max_size=3), size=st.sampled_from([1, 63, 64, 65, 200]))
def test_the_same_tokens_pass(rows, size):
    scores = torch.stack([scores_of(row["kind"], size, torch.Generator().manual_seed(row["seed"])) for row in rows])
    temperature = torch.tensor([[row["temperature"]] for row in rows])
    params = [SamplingParams(top_k=row["top_k"], top_p=row["top_p"], min_p=row["min_p"]) for row in rows]
    filters = Filters.of(params)
    actual, valid = kept(kernel.triton_thresholds, scores, temperature, filters)
    expected, expected_valid = kept(torch_thresholds, scores, temperature, filters)
    assert torch.equal(valid, expected_valid)
    if torch.equal(actual, expected):
        return
    # If a sum is equal to top-p's budget but for rounding, the last token that passes may differ.
    assert filters.top_p is not None
    fewer, more = (
        kept(torch_thresholds, scores, temperature, filters._replace(top_p=filters.top_p * (1 + change)))[0]
        for change in (-ROUNDING, ROUNDING)
    )
    assert torch.equal(fewer | actual, actual)
    assert torch.equal(actual | more, more)


def test_equal_scores_pass_or_fail_together():
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    for params, expected in (
        ({"top_k": 2}, [1, 2, 3]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_p": 0.3}, [1, 2, 3]),
        ({"top_k": 4, "top_p": 0.85}, [1, 2, 3]),
        ({"top_p": 0.9}, [0, 1, 2, 3]),
        ({"min_p": 0.5, "top_k": 5}, [1, 2, 3]),
    ):
        passing, _ = kept(kernel.triton_thresholds, scores, torch.ones(1, 1), Filters.of([SamplingParams(**params)]))
        assert passing.nonzero()[:, 1].tolist() == expected


def test_top_p_among_scores_of_top_k_far_below_the_highest():
    scores = torch.full((1, 1000), -30.0)
    # After the other scores of its lane, which the search must not overwrite.
    scores[0, 950] = 3.0
    scores[0, 600:900] = -6.0 - 0.01 * torch.arange(300)
    for top_k in (50, 250):
        for top_p in (0.9999, 0.997, 0.95):
            filters = Filters.of([SamplingParams(top_k=top_k, top_p=top_p)])
            actual, expected = (
                kept(function, scores, torch.ones(1, 1), filters)[0]
                for function in (kernel.triton_thresholds, torch_thresholds)
            )
            assert torch.equal(actual, expected)


def test_scores_with_equal_quotients_pass_or_fail_together():
    """Neighbours in float32 whose quotients round to the same number."""
    scores = torch.tensor([[1.0, 1.0, -5.0]])
    temperature = torch.tensor([[1.9]])
    while scores[0, 0] == scores[0, 1] or scores[0, 0] / 1.9 != scores[0, 1] / 1.9:
        scores[0, 0] = torch.nextafter(scores[0, 0], torch.tensor(0.0))
        scores[0, 1] = torch.nextafter(scores[0, 0], torch.tensor(2.0))
    for params in ({"top_k": 1}, {"top_p": 0.1}, {"top_k": 1, "top_p": 0.4}, {"top_k": 1, "top_p": 0.6}):
        passing, _ = kept(kernel.triton_thresholds, scores, temperature, Filters.of([SamplingParams(**params)]))
        assert passing.tolist() == [[True, True, False]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("places", [slice(None), slice(3, 4)], ids=["all", "one"])
def test_rows_without_a_token_to_choose_are_not_valid(bad, places):
    scores = torch.randn(2, SMALL + 5, generator=torch.Generator().manual_seed(0))
    scores[1, places] = bad
    draws = [draw(seed=1, top_p=0.9), draw(seed=2, top_p=0.9)]
    actual, expected = tensors(scores, [0, 1], draws, kernels=KERNELS), tensors(scores, [0, 1], draws)
    assert actual.valid.tolist() == expected.valid.tolist()
    assert torch.equal(actual.tokens[expected.valid], expected.tokens[expected.valid])


@pytest.mark.parametrize("temperature", [0.1, 1.0, 2.0])
def test_draws_are_the_same_and_none_is_short(temperature):
    logits = 3 * torch.randn(12, 300, generator=torch.Generator().manual_seed(3))
    logits[::3] *= 0.1
    draws = [draw(seed=i, temperature=temperature, **LIMITS[i % len(LIMITS)]) for i in range(12)]
    draws[7] = draw(seed=7)
    actual = tensors(logits, range(12), draws, widen=False, kernels=KERNELS)
    assert actual.short is None
    assert actual.valid.all()
    assert torch.equal(actual.tokens, tensors(logits, range(12), draws).tokens)


def test_a_row_does_not_depend_on_other_rows_or_on_memory_after_it():
    scores = 3 * torch.randn(5, 207, generator=torch.Generator().manual_seed(1))
    filters = Filters.of([SamplingParams(top_p=0.9, top_k=10 * i) for i in range(5)])
    temperature = torch.full((5, 1), 0.7)
    together, _ = kernel.triton_thresholds(scores[:, :200], temperature, filters)
    for i in range(5):
        row = slice(i, i + 1)
        alone, _ = kernel.triton_thresholds(scores[row, :200].clone(), temperature[row], filters.rows(row))
        assert torch.equal(alone, together[row])


def test_passes_the_test_at_load(monkeypatch):
    monkeypatch.setattr(kernel, "WIDTH", 1 << 11)
    # Without the 70 rows, which take the interpreter half a minute.
    monkeypatch.setattr(fusing, "THRESHOLD_SIZES", fusing.THRESHOLD_SIZES[:2])
    fusing.verify_thresholds(kernel.triton_thresholds, CPU)
