import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.formats import rounding
from engine_worker.formats.rounding import GROUP, ROUNDINGS
from tests.examples import examples

RANGE = 15
"""Steps between the lowest and the highest code of int4."""


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
    if name == "int8":
        assert (error <= rounded.scales * 0.5001).all()
        return
    for row in range(rows):
        for start in range(0, 2 * pairs, GROUP):
            values, errors = dense[row, start : start + GROUP].float(), error[row, start : start + GROUP]
            # Between the ends, at most half a step; the ends may be clamped, if that makes all errors together smaller.
            step = rounded.scales[row, start // GROUP]
            zero = rounded.zeros[row, start // GROUP]
            inside = (values > -zero * step) & (values < (RANGE - zero) * step)
            assert (errors[inside] <= step * 0.5001).all()
            assert errors.square().sum() <= plain(values).square().sum() * 1.02 + 1e-12


def plain(values: torch.Tensor) -> torch.Tensor:
    """Errors of a group in which the codes span the range of the values."""
    lowest, highest = values.min().clamp(max=0), values.max().clamp(min=0)
    step = (highest - lowest) / RANGE
    zero = (-lowest / step).round()
    return ((values / step).round() + zero).clamp(0, RANGE).sub(zero) * step - values


@pytest.mark.quick(3)
@pytest.mark.parametrize(("shape", "seed"), [((64, 512), 0), ((40, 96), 1)])
def test_int4_loses_less_than_symmetric_groups_of_64(shape, seed):
    """Which `quantize = int4` on OpenVINO had before: a fifth more."""
    dense = matrix(*shape, seed)
    groups = dense.view(len(dense), -1, math.gcd(64, shape[1]))
    lowest, highest = groups.aminmax(dim=2, keepdim=True)
    scales = torch.where(-lowest >= highest, lowest, highest) / -8
    before = (groups / scales).round().clamp(max=7) * scales
    error, error_before = (
        each.square().mean() for each in (ROUNDINGS["int4"](dense).decode() - dense, before - groups)
    )
    assert error.sqrt() < 0.88 * error_before.sqrt()
    assert error.sqrt() < 0.08 * dense.std()


def test_a_matrix_is_rounded_alike_in_parts_of_any_size(monkeypatch):
    dense = matrix(50, 80, 0)
    whole = ROUNDINGS["int4"](dense)
    monkeypatch.setattr(rounding, "PART", 160)
    assert torch.equal(ROUNDINGS["int4"](dense).decode(), whole.decode())
    assert torch.equal(ROUNDINGS["int4"](dense[7:9]).decode(), whole.decode()[7:9])


@pytest.mark.parametrize("name", ROUNDINGS)
def test_zeros_stay_zeros(name):
    dense = matrix(3, 80, 0)
    dense[1] = 0.0
    dense[2, :40] = 0.0
    decoded = ROUNDINGS[name](dense).decode()
    assert decoded.isfinite().all()
    assert not decoded[dense == 0].any()
