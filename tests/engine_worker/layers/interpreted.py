"""The layers' Triton kernels in Triton's interpreter, on a CPU; see `test_interpreted`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.layers.kernels import KERNELS, PRODUCT_TILE, TILE
from engine_worker.layers.mlp import silu_and_mul
from engine_worker.layers.norm import rms_norm
from engine_worker.layers.rotary import Rope, Rotary, rotate
from tests.engine_worker.models.test_fused import RandomModel
from tests.examples import examples

CPU = torch.device("cpu")
EPS = 1e-2
"""Large, so that a kernel which ignores it fails."""
HALF = {"atol": 4e-3, "rtol": 4e-3}
CLOSE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.float16: HALF}

rows = st.sampled_from([1, 2, 7, 64])
dtypes = st.sampled_from([torch.float32, torch.float16])
seeds = st.integers(0, 1000)


def numbers(seed: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


@examples(6)
@given(rows=rows, size=st.sampled_from([1, 48, 64, 1000]), added=st.booleans(), dtype=dtypes, seed=seeds)
def test_norm(rows, size, added, dtype, seed):
    random = numbers(seed, dtype)
    x, update, weight = random(rows, size), random(rows, size) if added else None, random(size)
    total = x if update is None else x + update
    expected = rms_norm(total, weight, EPS)
    torch.testing.assert_close(KERNELS.norm(x, update, weight, EPS), expected, **CLOSE[dtype])
    assert torch.equal(x, total)


def test_an_update_need_not_be_contiguous():
    random = numbers(0, torch.float32)
    x, update, weight = random(3, 8), random(8, 3).T, random(8)
    expected = rms_norm(x + update, weight, EPS)
    torch.testing.assert_close(KERNELS.norm(x, update, weight, EPS), expected)


@examples(6)
@given(
    rows=rows,
    heads=st.sampled_from([1, 3, 8, 40]),
    head_dim=st.sampled_from([2, 16, 80, 128]),
    values=st.integers(0, 2),
    weighted=st.booleans(),
    dtype=dtypes,
    seed=seeds,
)
def test_rotate(rows, heads, head_dim, values, weighted, dtype, seed):
    random = numbers(seed, dtype)
    x = random(rows, heads + values, head_dim)[:, :heads]
    weight = random(heads, head_dim) if weighted else None
    rotations = Rotary(Rope(10000.0), head_dim, dtype, CPU).rotations(torch.arange(5, 5 + rows))
    expected = rotate(x if weight is None else rms_norm(x, weight, EPS), rotations)
    rotated = KERNELS.rotate(x, rotations, weight, EPS)
    assert rotated.is_contiguous()
    torch.testing.assert_close(rotated, expected, **(CLOSE[dtype] if weight is None else {"atol": 2e-2, "rtol": 1e-2}))
    if dtype == torch.float32:
        torch.testing.assert_close(rotated, expected, **CLOSE[dtype])


@examples(6)
@given(rows=rows, size=st.sampled_from([1, 80, TILE, TILE + 3]), dtype=dtypes, seed=seeds)
def test_gate(rows, size, dtype, seed):
    x = 4 * numbers(seed, dtype)(rows, 2 * size)
    torch.testing.assert_close(KERNELS.gate(x), silu_and_mul(x), **CLOSE[dtype])


@examples(6)
@given(
    inputs=st.sampled_from([1, 80, 1024, PRODUCT_TILE, PRODUCT_TILE + 3]),
    outputs=st.sampled_from([1, 2, 7, 64]),
    dtype=dtypes,
    seed=seeds,
)
def test_product(inputs, outputs, dtype, seed):
    random = numbers(seed, dtype)
    x, weight = random(1, inputs), random(outputs, inputs) * inputs**-0.5
    product = KERNELS.product(x, weight)
    assert product.shape == (1, outputs)
    torch.testing.assert_close(product, x @ weight.T, **CLOSE[dtype])


@pytest.mark.parametrize("name", ["qwen3, biased", "llama, biased, linear rope"])
@torch.inference_mode()
def test_a_model(name):
    random_model = RandomModel(name)
    expected = random_model.logits()
    random_model.model.fuse(KERNELS)
    torch.testing.assert_close(random_model.logits(), expected, atol=1e-3, rtol=1e-3)
