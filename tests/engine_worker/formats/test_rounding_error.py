import pytest
import torch

from engine_worker.formats.rounding import rounding_of
from engine_worker.formats.rounding_error import RoundingError

MATRICES = {
    f"model.layers.{layer}.{name}.weight": torch.randn(
        rows, 128, generator=torch.Generator().manual_seed(8 * layer + rows)
    )
    * 10.0**-layer
    for layer in range(3)
    for name, rows in (("self_attn.q_proj", 96), ("self_attn.v_proj", 50), ("mlp.up_proj", 7))
}


def measured(quantize: str, matrices: dict[str, torch.Tensor] = MATRICES) -> RoundingError:
    error = RoundingError(quantize)
    for name, matrix in matrices.items():
        error.add(name, matrix)
    return error


@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8"])
def test_a_few_rows_tell_the_error_of_all_matrices_whatever_their_size(quantize):
    squares = []
    for name, matrix in MATRICES.items():
        error = rounding_of(quantize, name)(matrix).decode() - matrix
        squares.append(float(error.square().sum() / matrix.square().sum()))
    assert measured(quantize).mean == pytest.approx((sum(squares) / len(squares)) ** 0.5, rel=0.05)


def test_what_is_not_rounded_does_not_count():
    others = {"model.layers.0.mlp.gate.weight": torch.randn(8, 128), "model.norm.weight": torch.randn(128)}
    assert measured("int4", MATRICES | others).mean == measured("int4").mean
    assert measured("none").mean == measured("int4", {}).mean == 0
    assert measured("int4", {"lm_head.weight": torch.zeros(8, 128)}).mean == 0


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_only_a_large_error_is_reported(quantize):
    warnings = []
    measured(quantize).report("m", lambda *warning: warnings.append(warning))
    assert [(event, reason[:43]) for event, reason in warnings] == (
        [("weights_rounded_coarsely", "quantize = int4 changes the weights of m by")] if quantize == "int4" else []
    )
