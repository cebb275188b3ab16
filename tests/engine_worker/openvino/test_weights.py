"""Matrix products of the graph with quantized weights, against torch with the same rounded values."""

from collections import Counter

import openvino as ov
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino import opset13 as op

from engine_worker.formats.rounding import int8
from engine_worker.formats.stored import TABLES, Kind, random_stored
from engine_worker.openvino.compiled import _core
from engine_worker.openvino.matrices import GROUP_UNIT, INTEGERS, Products, keeps
from engine_worker.openvino.weights import (
    ConstantStore,
    Format,
    Int4,
    Int8,
    formats,
    quantize_groups,
)
from sluice import tiny_model
from tests.engine_worker.openvino.loaded import load

STORE = ConstantStore()
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
"""Properties with which the plugin does not quantize the other operand of a product."""


def matrix(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def product(form: Format, weights: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, set[str]]:
    """x Wᵀ as the plugin computes it, and the types in which it stores weight matrices."""
    rows = op.parameter(ov.PartialShape([-1, weights.shape[1]]), ov.Type.f32)
    model = ov.Model([op.matmul(rows, form.node(weights), False, True).output(0)], [rows], "product")
    compiled = _core().compile_model(model, "CPU", EXACT)
    result = torch.from_numpy(compiled.create_infer_request().infer({0: x.numpy()})[0].copy())
    return result, set(matrix_types(compiled))


def matrix_types(compiled: ov.CompiledModel) -> Counter[str]:
    """Number of matrix products by the type of their weights."""
    nodes = compiled.get_runtime_model().get_ordered_ops()
    products = [node for node in nodes if "FullyConnected" in str(node.get_rt_info()["layerType"].astype(str))]
    return Counter(node.input_value(1).get_element_type().get_type_name() for node in products)


@pytest.mark.parametrize("inputs", [64, 96, 448, 80])
@pytest.mark.parametrize(("form", "kind"), [(Int8(STORE), "i8"), (Int4(STORE), "i4")], ids=["int8", "int4"])
def test_the_plugin_computes_with_the_rounded_values_and_stores_them_packed(form, kind, inputs):
    weights, x = matrix(72, inputs), matrix(5, inputs, seed=1)
    result, types = product(form, weights, x)
    torch.testing.assert_close(result, x @ form.rounded(weights).T, atol=1e-4, rtol=1e-4)
    assert types == {kind}


@pytest.mark.parametrize(("quantize", "types"), [("int8", {"i8": 25}), ("int4", {"i4": 18, "i8": 13})])
def test_a_decoder_stores_its_weights_packed(quantize, types):
    """There are four products in each of six layers, and the head. With int4, values have a product of their own."""
    runner = load(tiny_model.path(), quantize=quantize)
    assert matrix_types(runner._forward.rank.model) == types
    assert runner.dtype == quantize


@settings(deadline=None)
@given(outputs=st.integers(1, 70), inputs=st.integers(1, 200), seed=st.integers(0, 9), scale=st.floats(1e-6, 1e6))
def test_the_rounding_error_is_at_most_half_a_step(outputs, inputs, seed, scale):
    weights = matrix(outputs, inputs, seed) * scale
    scales = int8(weights).scales
    assert ((Int8(STORE).rounded(weights) - weights).abs() <= scales * 0.5001).all()
    values, scales = quantize_groups(weights)
    error = (Int4(STORE).rounded(weights) - weights).view(values.shape).abs()
    # Up to a whole step where 8, which int4 does not have, would be the nearest value.
    assert (error <= scales.abs() * torch.where(values == 7, 1.0001, 0.5001)).all()
    assert (values.amax(2) <= 7).all()
    assert (values.amin(2) == -8).all()


@pytest.mark.parametrize("form", [Int8(STORE), Int4(STORE)], ids=["int8", "int4"])
def test_zeros_stay_zeros(form):
    assert torch.equal(form.rounded(torch.zeros(3, 128)), torch.zeros(3, 128))


def test_with_int4_embedding_and_head_are_int8():
    assert formats("int4", STORE).vocabulary == Int8(STORE)


@pytest.mark.parametrize("kind", [*INTEGERS, *TABLES])
@pytest.mark.parametrize(("columns", "group"), [(60, 12), (60, 20), (48, 4), (72, 24), (66, None), (80, 10), (90, 15)])
def test_products_are_right_for_every_group_that_is_kept(kind, columns, group):
    stored = random_stored(Kind(kind, group, "none", False), 40, columns, 1)
    if not keeps(stored):
        assert group % GROUP_UNIT
        return
    x = torch.randn(16, columns, generator=torch.Generator().manual_seed(0))
    parameter = op.parameter(ov.PartialShape([-1, columns]), ov.Type.f32)
    node = Products(formats("none", STORE), STORE, activations=False).linear({"model.layers.0.a": stored}, parameter)
    compiled = _core().compile_model(ov.Model([node.output(0)], [parameter], "product"), "CPU", EXACT)
    (found,) = compiled([x.numpy()]).values()
    torch.testing.assert_close(torch.from_numpy(found), x @ stored.decode().T, atol=1e-4, rtol=1e-4)
