"""The kernels for quantized matrices on this machine's GPU.

`python -m bench.gpu` runs these tests; they need no package but torch, Triton, safetensors and pytest."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from engine_worker.layers.coded import FEW_ROWS, TYPES, Buffer, CodedProduct, encode
from engine_worker.runner.coded_trial import verify
from engine_worker.runner.fusing import compare
from tests.engine_worker.layers.coded_cases import ZEROS, in_order, random_matrix

pytestmark = pytest.mark.slow

LAYOUTS = ((300, 1000, 32), (96, 4096, 128), (129, 656, 48), (64, 2048, 2048))
"""Outputs, inputs and columns of a group."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("kind", TYPES)
def test_products_with_codes_agree_with_decoded_matrices(kind, record_property):
    if not torch.cuda.is_available():
        pytest.skip("it needs a CUDA device")
    pytest.importorskip("triton")
    from engine_worker.layers.coded_kernels import KERNELS

    device, count = torch.device("cuda"), 0
    for index, (layout, zeros) in enumerate(product(LAYOUTS, ZEROS)):
        dtype = DTYPES[index % len(DTYPES)]
        stored = random_matrix(kind, *layout, zeros, ordered=index % 2 == 1)
        matrix, dense = encode(stored, device), in_order(stored).to(device, dtype)
        verify(KERNELS, matrix, dense, biased=index % 4 == 0)
        x = torch.randn(FEW_ROWS + 9, matrix.inputs, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        whole = stored.decode().to(device, dtype)
        found = CodedProduct(matrix, KERNELS, Buffer(dtype, device))(x, None)
        compare("product by the buffer", found, F.linear(x, whole))
        count += 1
    record_property("detail", f"{count} matrices")
