from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from engine_worker.layers import coded
from engine_worker.layers.coded import FEW_ROWS, Buffer, CodedProduct, encode, encode_experts, refused
from tests.engine_worker.layers.coded_cases import CPU, TorchKernels, dense, random_experts, random_matrix


@pytest.mark.parametrize(("max_bytes", "parts"), [(1 << 20, 1), (4 * 96 * 16, 3), (1, 3)])
def test_a_matrix_larger_than_the_buffer_is_decoded_in_parts(max_bytes, parts):
    stored, kernels = random_matrix("u4", 40, 96, 32, "fraction", ordered=True), TorchKernels()
    product = CodedProduct(encode(stored, CPU), kernels.kernels, Buffer(torch.float32, CPU, max_bytes))
    random = torch.Generator().manual_seed(0)
    x, bias = torch.randn(FEW_ROWS + 1, 96, generator=random), torch.randn(40, generator=random)
    torch.testing.assert_close(product(x, bias), F.linear(x, stored.decode(), bias), atol=1e-4, rtol=1e-4)
    assert kernels.launches == ["decode"] * parts


def test_matrices_share_the_buffer():
    buffer, kernels, random = Buffer(torch.float32, CPU), TorchKernels(), torch.Generator().manual_seed(0)
    matrices = [random_matrix(kind, rows, 64, 64, seed=rows) for kind, rows in (("u4", 8), ("i8", 24), ("nf4", 16))]
    products = [CodedProduct(encode(matrix, CPU), kernels.kernels, buffer) for matrix in matrices]
    assert buffer.take(24, 64).shape == (24, 64)
    x = torch.randn(FEW_ROWS + 1, 64, generator=random)
    for matrix, product in zip(matrices, products, strict=True):
        torch.testing.assert_close(product(x, None), F.linear(x, matrix.decode()), atol=1e-4, rtol=1e-4)


def test_scales_and_zeros_are_as_short_as_their_values_allow():
    stored = random_matrix("u8", 3, 64, 32, "integer")
    for scales, dtype in (
        (stored.scales, torch.float32),
        (stored.scales.half().float(), torch.float16),
        (stored.scales.bfloat16().float(), torch.bfloat16),
    ):
        stored.scales.copy_(scales)
        encoded = encode(stored, CPU)
        assert (encoded.scales.dtype, encoded.zeros.dtype) == (dtype, torch.uint8)
        assert torch.equal(dense(encoded), stored.decode())


@pytest.mark.parametrize(
    ("kind", "group", "reason"),
    [("u4", 48, None), ("u4", 24, "groups of 24"), ("u4", 96, None), ("f8e5m2", 32, "f8e5m2")],
)
def test_what_kernels_refuse(kind, group, reason):
    assert refused(random_matrix(kind, 2, 96, group)) == reason


def test_many_rows_are_put_in_order_in_parts(monkeypatch):
    stored = random_matrix("u4", 40, 196, 32, "fraction")
    whole = encode(stored, CPU)
    monkeypatch.setattr(coded, "ENCODED", 16)
    assert torch.equal(encode(stored, CPU).codes, whole.codes)


def test_experts_with_and_without_zeros_are_of_one_kind():
    """A reader leaves out zeros that are all alike."""
    signed, unsigned = random_matrix("i4", 4, 64, 32), random_matrix("u4", 4, 64, 32, "integer")
    experts = encode_experts([[signed], [unsigned]], CPU)
    assert torch.equal(dense(experts.matrix), torch.cat((signed.decode(), unsigned.decode())))


def test_experts_of_different_kinds_are_none():
    for kind, group in (("u4", 64), ("f8e4m3", 32)):
        assert encode_experts([[random_matrix("u4", 4, 64, 32)], [random_matrix(kind, 4, 64, group)]], CPU) is None


def test_matrices_of_an_expert_need_one_order_of_inputs():
    experts = random_experts("u4", 2, 4, 64, 32, ordered=True)
    orders = [first.order for first, _ in experts]
    assert torch.equal(encode_experts(experts, CPU).order, torch.stack(orders).int())
    first, second = experts[1]
    assert encode_experts([experts[0], [first, replace(second, order=None)]], CPU) is None
    none = [[replace(part, order=None) for part in experts[0]], experts[1]]
    assert torch.equal(encode_experts(none, CPU).order[0], torch.arange(64).int())
