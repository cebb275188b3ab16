import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.formats import rounding
from engine_worker.formats.rounding import GROUP, ROUNDINGS, rounding_of
from tests.examples import examples

STEPS = 15
"""Between the lowest and the highest code of int4."""


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
    assert rounded.group in (GROUP, 32, 16, 8, 4, 2 * pairs)
    groups = dense.float().view(rows, -1, rounded.group)
    steps = (groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)) / STEPS
    # A rounded zero and scale may cost another half of a step.
    assert (error.view(groups.shape) <= steps.unsqueeze(2) * 1.1).all()


@pytest.mark.parametrize(("quantize", "error"), [("int8", 0.008), ("fp8", 0.03), ("int4", 0.1)])
def test_normally_distributed_values_change_by_so_much(quantize, error):
    dense = matrix(64, 512, 0)
    found = (ROUNDINGS[quantize](dense).decode() - dense).square().mean().sqrt() / dense.std()
    assert 0.8 * error < found < error


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


@pytest.mark.parametrize(
    ("name", "rounded"),
    [
        ("model.layers.3.self_attn.q_proj.weight", {"int8": "int8", "int4": "int4", "fp8": "fp8"}),
        ("model.layers.3.mlp.gate_proj.weight", {"int8": "int8", "int4": "int4", "fp8": "fp8"}),
        ("model.layers.3.mlp.down_proj.weight", {"int8": "int8", "int4": "int8", "fp8": "fp8"}),
        ("model.embed_tokens.weight", {"int8": "int8", "int4": "int8", "fp8": "fp8"}),
        ("lm_head.weight", {"int8": "int8", "int4": "int8", "fp8": "fp8"}),
        ("model.layers.3.mlp.gate.weight", {}),
        ("model.layers.3.self_attn.q_proj.bias", {}),
    ],
)
def test_the_name_of_a_matrix_decides_how_it_is_rounded(name, rounded):
    assert {each: rounding_of(each, name) for each in ROUNDINGS} == {
        each: ROUNDINGS.get(rounded.get(each, "")) for each in ROUNDINGS
    }
    assert rounding_of("none", name) is None
