"""Tests the sampling kernels with Triton's interpreter, on a CPU; see `test_interpreted`."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.sampling import kernels, noise
from engine_worker.sampling.choose import TORCH
from engine_worker.sampling.noise import torch_gumbel_max
from tests.engine_worker.sampling.draws import draw, tensors
from tests.examples import examples

KERNELS = TORCH._replace(gumbel_max=kernels.triton_gumbel_max)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@triton.jit
def bits_of(key, ids, out, GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BITS: tl.constexpr):  # noqa: N803
    at = tl.arange(0, 8)
    tl.store(out + at, kernels.random_bits(tl.load(key), tl.load(ids + at), GOLDEN, FIRST, SECOND, BITS))


@examples(100)
@given(key=INT64, ids=st.lists(st.integers(0, (1 << 31) - 1), min_size=8, max_size=8))
def test_the_bits_of_a_token_are_the_same(key, ids):
    keys, tokens, bits = torch.tensor([key]), torch.tensor(ids), torch.empty(8, dtype=torch.int64)
    bits_of[(1,)](keys, tokens.int(), bits, **kernels.NOISE)
    assert torch.equal(bits, noise.random_bits(keys, tokens))


def winners(kernel, *arguments):
    """[N] sums and [N] tokens of the winners."""
    sums, tokens = kernel(*arguments)
    peak, part = sums.max(dim=1, keepdim=True)
    return peak.squeeze(1), tokens.gather(1, part).squeeze(1)


@examples(12)
@given(
    rows=st.sampled_from([1, 2, 7, 64]),
    size=st.sampled_from([1, 97, kernels.WIDTH, 2 * kernels.WIDTH + 5]),
    padding=st.sampled_from([0, 3]),
    limited=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_winners_are_the_same(rows, size, padding, limited, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(rows, size + padding, generator=generator)[:, :size]
    temperature = 0.1 + 2 * torch.rand(rows, 1, generator=generator)
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (rows, 1), generator=generator)
    threshold = scores.amax(dim=1, keepdim=True) / temperature - 1.0 if limited else None
    expected = winners(torch_gumbel_max, scores, temperature, keys, threshold)
    actual = winners(kernels.triton_gumbel_max, scores, temperature, keys, threshold)
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[0], expected[0], atol=1e-12, rtol=1e-12)


@triton.jit
def exponential_of(bits, out, BITS: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr):  # noqa: N803
    at = tl.arange(0, WIDTH)
    tl.store(out + at, kernels.exponential(tl.load(bits + at), BITS, UNIT))


def test_noise_in_float32_is_accurate_to_the_margin_at_both_ends():
    top = (1 << noise.BITS) - 1
    ends = [0, 1, 2, 1000, top // 2 - 1, top // 2, top // 2 + 1, top - 1000, top - 2, top - 1, top]
    some = torch.randint(0, top + 1, (1024 - len(ends),), generator=torch.Generator().manual_seed(4))
    bits, exponentials = torch.cat((torch.tensor(ends), some)), torch.empty(1024)
    exponential_of[(1,)](bits, exponentials, BITS=noise.BITS, UNIT=kernels.UNIT, WIDTH=1024)
    torch.testing.assert_close(-exponentials.double().log(), noise.gumbel(bits), atol=kernels.MARGIN / 100, rtol=0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("above", [-3e-7, 3e-7])
def test_a_near_tie_is_decided_in_float64(above):
    """The best two tokens are in different parts, and their sums are closer than the precision of float32."""
    rows, size = 64, 2 * kernels.WIDTH
    keys = torch.arange(1, rows + 1)[:, None] * 7919
    scores = torch.full((rows, size), -100.0)
    first, other = 5, kernels.WIDTH + 9
    drawn = noise.gumbel(noise.random_bits(keys, torch.arange(size)))
    scores[:, first] = 30.0
    scores[:, other] = (30.0 + drawn[:, first] - drawn[:, other] + above).float()
    temperature = torch.ones(rows, 1)
    expected = winners(torch_gumbel_max, scores, temperature, keys, None)
    assert torch.equal(winners(kernels.triton_gumbel_max, scores, temperature, keys, None)[1], expected[1])
    assert set(expected[1].tolist()) == {first, other}


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("places", [slice(None), slice(3, 4)], ids=["all", "one"])
def test_scores_that_are_not_finite_choose_a_token_of_the_vocabulary(bad, places):
    scores = torch.randn(2, kernels.WIDTH + 5, generator=torch.Generator().manual_seed(0))
    scores[1, places] = bad
    _, tokens = kernels.triton_gumbel_max(scores, torch.ones(2, 1), torch.tensor([[1], [2]]), None)
    assert tokens.min() >= 0
    assert tokens.max() < scores.shape[1]
    draws = [draw(seed=1), draw(seed=2)]
    actual, expected = (
        tensors(scores, [0, 1], draws, kernels=KERNELS),
        tensors(scores, [0, 1], draws),
    )
    assert actual.valid.tolist() == expected.valid.tolist()
    assert torch.equal(actual.tokens[expected.valid], expected.tokens[expected.valid])


def test_unfiltered_draws_of_all_kinds():
    logits = 3 * torch.randn(40, 2000, generator=torch.Generator().manual_seed(3))
    kinds = ({}, {"min_p": 0.05}, {"temperature": 0.0}, {"top_k": 5}, {"repetition_penalty": 1.5, "prompt": [1, 2]})
    draws = [draw(seed=i, **kinds[i % len(kinds)]) for i in range(40)]
    actual = tensors(logits, range(40), draws, kernels=KERNELS)
    assert actual.valid.all()
    assert torch.equal(actual.tokens, tensors(logits, range(40), draws).tokens)
