"""Matrix products of the graph with quantized weights, against torch with the same rounded values."""

from collections import Counter

import openvino as ov
import pytest
import torch
from openvino import opset13 as op

from engine_worker.formats.rounding import NAMES, int4, int8
from engine_worker.formats.stored import TABLES, Kind, random_stored
from engine_worker.openvino.compiled import _core
from engine_worker.openvino.matrices import GROUP_UNIT, INTEGERS, Products, keeps
from engine_worker.openvino.weights import ConstantStore, Format, Rounded, Weights
from sluice import tiny_model
from tests.engine_worker.openvino.loaded import load

STORE = ConstantStore()
INT8, INT4 = Rounded(STORE, int8), Rounded(STORE, int4)
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


@pytest.mark.parametrize("inputs", [64, 96, 448, 80, 84, 66])
@pytest.mark.parametrize(("form", "kind"), [(INT8, "i8"), (INT4, "u4")], ids=["int8", "int4"])
def test_the_plugin_computes_with_the_rounded_values_and_stores_them_packed(form, kind, inputs):
    weights, x = matrix(72, inputs), matrix(5, inputs, seed=1)
    result, types = product(form, weights, x)
    torch.testing.assert_close(result, x @ form.rounded(weights).T, atol=1e-4, rtol=1e-4)
    assert types == {kind}


@pytest.mark.parametrize(("quantize", "types"), [("int8", {"i8": 25}), ("int4", {"u4": 12, "i8": 19})])
def test_a_decoder_stores_its_weights_packed(quantize, types):
    """There are four products in each of six layers, and the head. With int4, keys and values have one of their own."""
    runner = load(tiny_model.path(), quantize=quantize)
    assert matrix_types(runner._forward.rank.model) == types
    assert runner.dtype == runner.choices["quantize"] == NAMES[quantize]


@pytest.mark.parametrize("form", [INT8, INT4], ids=["int8", "int4"])
def test_zeros_stay_zeros(form):
    assert torch.equal(form.rounded(torch.zeros(3, 128)), torch.zeros(3, 128))


@pytest.mark.parametrize("kind", [*INTEGERS, *TABLES])
@pytest.mark.parametrize(("columns", "group"), [(60, 12), (60, 20), (48, 4), (72, 24), (66, None), (80, 10), (90, 15)])
def test_products_are_right_for_every_group_that_is_kept(kind, columns, group):
    stored = random_stored(Kind(kind, group, "none", False), 40, columns, 1)
    if not keeps(stored):
        assert group % GROUP_UNIT
        return
    x = torch.randn(16, columns, generator=torch.Generator().manual_seed(0))
    parameter = op.parameter(ov.PartialShape([-1, columns]), ov.Type.f32)
    node = Products(Weights("none", STORE), STORE, activations=False).linear({"model.layers.0.a": stored}, parameter)
    compiled = _core().compile_model(ov.Model([node.output(0)], [parameter], "product"), "CPU", EXACT)
    (found,) = compiled([x.numpy()]).values()
    torch.testing.assert_close(torch.from_numpy(found), x @ stored.decode().T, atol=1e-4, rtol=1e-4)
