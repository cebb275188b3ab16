"""The kernels for quantized matrices in Triton's interpreter, on a CPU; see `test_interpreted`."""

import pytest
import torch
import torch.nn.functional as F

from engine_worker.layers.coded import TYPES, Buffer, CodedProduct, encode
from engine_worker.layers.coded_kernels import KERNELS
from tests.engine_worker.formats.checkpoints import write_pair
from tests.engine_worker.layers.coded_cases import CPU, ZEROS, dense, in_order, random_matrix
from tests.engine_worker.models.checkpoints import open_written
from tests.engine_worker.runner.held import decoded, held, logits

CLOSE = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, torch.float16: {"atol": 2e-2, "rtol": 4e-3}}
LAYOUTS = {
    # Neither inputs nor outputs are multiples of a tile, and the last group is short.
    "ragged": (37, 196, 32),
    "wide groups": (5, 320, 128),
    "odd multiples": (33, 208, 48),
    "per row": (40, 72, 72),
}


def check(stored, rows: int, dtype: torch.dtype, *, biased: bool = False) -> None:
    random = torch.Generator().manual_seed(1)
    outputs, inputs = stored.shape
    x = torch.randn(rows, inputs, generator=random).to(dtype)
    bias = torch.randn(outputs, generator=random).to(dtype) if biased else None
    found = CodedProduct(encode(stored, CPU), KERNELS, Buffer(dtype, CPU))(x, bias)
    torch.testing.assert_close(found, F.linear(x, stored.decode().to(dtype), bias), **CLOSE[dtype])


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("kind", TYPES)
def test_rows_are_decoded_to_the_values_of_the_dense_matrix(kind, zeros):
    other = sorted(LAYOUTS)[(TYPES.index(kind) + ZEROS.index(zeros)) % len(LAYOUTS)]
    for layout in {"ragged", other}:
        outputs, inputs, group = LAYOUTS[layout]
        stored = random_matrix(kind, outputs, inputs, group, zeros)
        expected = stored.decode()
        for dtype, chosen in ((torch.float16, None), (torch.float32, torch.tensor([3, 0, 3]))):
            out = torch.full((outputs if chosen is None else 3, inputs), torch.nan, dtype=dtype)
            KERNELS.decode(encode(stored, CPU), chosen, out)
            assert torch.equal(out, (expected if chosen is None else expected[chosen]).to(dtype))


@pytest.mark.parametrize("rows", [1, 3, 17, 130])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["u4", "i8"])
def test_products(kind, layout, rows):
    index = list(LAYOUTS).index(layout)
    stored = random_matrix(kind, *LAYOUTS[layout], ZEROS[(index + rows) % 3], ordered=bool(index % 2))
    check(stored, rows, torch.float32 if rows == 3 else torch.float16, biased=index < 2)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", TYPES)
def test_products_of_all_types(kind, rows):
    check(random_matrix(kind, 9, 80, 16, "integer", ordered=True), rows, torch.float32)


def test_a_product_reads_no_columns_past_the_last():
    """What is there may be anything."""
    stored = random_matrix("u4", 5, 72, 72)
    encoded = encode(stored, CPU)
    x = torch.randn(1, 72, generator=torch.Generator().manual_seed(0))
    expected = KERNELS.product(x, encoded, None)
    encoded.codes[:, 72 - 64 :].view(-1, 56)[:] |= 0xF0
    torch.testing.assert_close(KERNELS.product(x, encoded, None), expected)


@pytest.mark.parametrize("kind", TYPES)
def test_the_stand_in_of_other_tests_reads_the_same_layout(kind):
    stored = random_matrix(kind, 5, 196, 32, "fraction")
    assert torch.equal(dense(encode(stored, CPU)), in_order(stored))


@pytest.mark.long
@torch.inference_mode()
def test_a_model(tmp_path):
    """Its kernels are tested before they are used, as on a GPU."""
    quantized, dense = write_pair(tmp_path, "qwen3, biased", "GPTQ, act-order")
    model, summary = held(open_written(quantized), KERNELS)
    assert summary == "13 as stored in u4"
    expected = decoded(open_written(dense))
    for counts in ((1,), (3, 5)):
        torch.testing.assert_close(logits(model, *counts), logits(expected, *counts), atol=1e-3, rtol=1e-3)
