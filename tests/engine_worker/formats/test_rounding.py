import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.formats.rounding import GROUP, ROUNDINGS
from tests.examples import examples

STEPS = {"int8": 2 * 127, "int4": 15}


def matrix(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@examples(20)
@given(rows=st.integers(1, 5), pairs=st.integers(1, 50), seed=st.integers(0, 99), bfloat16=st.booleans())
@pytest.mark.parametrize("name", ROUNDINGS)
def test_errors_are_at_most_half_a_step(name, rows, pairs, seed, bfloat16):
    dense = matrix(rows, 2 * pairs, seed, torch.bfloat16 if bfloat16 else torch.float32)
    dense[0, 0] = 100.0
    rounded = ROUNDINGS[name](dense)
    error = (rounded.decode() - dense.float()).abs()
    if name == "fp8":
        # Four significant bits; below 2**-6 of the scale's unit, steps of 2**-9.
        assert (error <= dense.float().abs() / 16 + rounded.scales * 2.0**-10).all()
        return
    assert rounded.shape == dense.shape
    for row in range(rows):
        for start in range(0, 2 * pairs, GROUP if name == "int4" else 2 * pairs):
            part = slice(start, start + (GROUP if name == "int4" else 2 * pairs))
            values = dense[row, part].float()
            span = 2 * values.abs().max() if name == "int8" else values.max().clamp(min=0) - values.min().clamp(max=0)
            # In int4 a rounded scale and zero may cost another half of a step.
            assert (error[row, part] <= span / STEPS[name] * (0.51 if name == "int8" else 1.1)).all()


@pytest.mark.parametrize("name", ROUNDINGS)
def test_zeros_stay_zeros(name):
    dense = matrix(3, 80, 0)
    dense[1] = 0.0
    dense[2, :40] = 0.0
    decoded = ROUNDINGS[name](dense).decode()
    assert decoded.isfinite().all()
    assert not decoded[dense == 0].any()
