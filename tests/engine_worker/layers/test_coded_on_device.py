"""The kernels for quantized matrices on this machine's GPU.

`python -m bench.gpu` runs these tests; they need no package but torch, Triton, safetensors and pytest."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from engine_worker.layers.coded import (
    FEW_ROWS,
    TYPES,
    Buffer,
    CodedGroup,
    CodedKernels,
    CodedProduct,
    encode,
    encode_experts,
)
from engine_worker.runner.coded_trial import some_experts, verify, verify_experts
from engine_worker.runner.fusing import compare
from tests.engine_worker.layers.coded_cases import ZEROS, by_expert, in_order, random_experts, random_matrix

pytestmark = pytest.mark.slow

LAYOUTS = ((300, 1000, 32), (96, 4096, 128), (129, 656, 48), (64, 2048, 2048))
"""Outputs, inputs and columns of a group."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COUNTS = ((1, 0, 1, 1, 0), (0, 40, 3, 0, 129), (200, 150, 0, 128, 700))
"""Rows of each expert."""
STEP = 4


def find_kernels() -> CodedKernels:
    if not torch.cuda.is_available():
        pytest.skip("it needs a CUDA device")
    pytest.importorskip("triton")
    from engine_worker.layers.coded_kernels import KERNELS

    return KERNELS


@pytest.mark.parametrize("kind", TYPES)
def test_products_with_codes_agree_with_decoded_matrices(kind, record_property):
    kernels, device, count = find_kernels(), torch.device("cuda"), 0
    for index, (layout, zeros) in enumerate(product(LAYOUTS, ZEROS)):
        dtype = DTYPES[index % len(DTYPES)]
        stored = random_matrix(kind, *layout, zeros, ordered=index % 2 == 1)
        matrix, dense = encode(stored, device), in_order(stored).to(device, dtype)
        verify(kernels, matrix, dense, biased=index % 4 == 0)
        x = torch.randn(FEW_ROWS + 9, matrix.inputs, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        whole = stored.decode().to(device, dtype)
        found = CodedProduct(matrix, kernels, Buffer(dtype, device))(x, None)
        compare("product by the buffer", found, F.linear(x, whole))
        count += 1
    record_property("detail", f"{count} matrices")


@pytest.mark.parametrize("kind", TYPES)
def test_grouped_products_with_codes_agree_with_decoded_matrices(kind, record_property):
    kernels, device, count = find_kernels(), torch.device("cuda"), 0
    # A few of all layouts for each type: each needs kernels for four tiles, which take time to compile.
    for index, (layout, zeros) in list(enumerate(product(LAYOUTS, ZEROS)))[TYPES.index(kind) % STEP :: STEP]:
        dtype, counts = DTYPES[index % len(DTYPES)], COUNTS[index // STEP]
        experts = random_experts(kind, len(counts), *layout, zeros, ordered=index % 2 == 1)
        coded = encode_experts(experts, device)
        dense = {i: torch.cat([part.decode() for part in experts[i]]) for i in some_experts(len(counts))}
        verify_experts(kernels, coded, {i: weight.to(device, dtype) for i, weight in dense.items()})
        x = torch.randn(sum(counts), layout[1], generator=torch.Generator().manual_seed(0)).to(device, dtype)
        ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
        compare("grouped product", CodedGroup(coded, kernels)(x, ends), by_expert(experts, x, counts))
        count += 1
    record_property("detail", f"{count} layers of experts")
