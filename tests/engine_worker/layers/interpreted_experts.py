"""The kernel for quantized matrices of experts in Triton's interpreter, on a CPU; see `test_interpreted`."""

import itertools

import pytest
import torch

from engine_worker.layers.coded import TYPES, CodedGroup, encode_experts
from engine_worker.layers.coded_kernels import KERNELS
from tests.engine_worker.formats.checkpoints import write_pair
from tests.engine_worker.layers.coded_cases import CPU, ZEROS, by_expert, random_experts
from tests.engine_worker.models.checkpoints import open_written
from tests.engine_worker.runner.held import decoded, held, logits

CLOSE = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, torch.float16: {"atol": 2e-2, "rtol": 4e-3}}
LAYOUTS = {
    # Neither inputs nor outputs are multiples of a tile, and the last group is short.
    "ragged": (37, 100, 32),
    "wide groups": (5, 256, 128),
    "odd multiples": (33, 112, 48),
    "per row": (40, 72, 72),
}
COUNTS = {
    "one each": (1, 1, 1, 1),
    "a single row": (0, 0, 1, 0),
    "none of the first and the last": (0, 20, 3, 0),
    "all of one": (0, 0, 0, 37),
    "one of a tile, and one more": (16, 17, 0, 1),
    "tiles of 32": (100, 1, 2, 0),
    "tiles of 64": (2, 130, 0, 65),
}


def check(experts, counts, dtype: torch.dtype) -> None:
    coded = encode_experts(experts, CPU)
    x = torch.randn(sum(counts), coded.matrix.inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    # The first expert's rows begin at 0, whatever is before `ends` in memory.
    ends = torch.tensor([7, *itertools.accumulate(counts)], dtype=torch.int32)[1:]
    torch.testing.assert_close(CodedGroup(coded, KERNELS)(x, ends), by_expert(experts, x, counts), **CLOSE[dtype])


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("kind", ["u4", "i8"])
def test_rows_in_every_distribution(kind, counts):
    index = list(COUNTS).index(counts)
    outputs, inputs, group = list(LAYOUTS.values())[index % len(LAYOUTS)]
    experts = random_experts(kind, 4, outputs, inputs, group, ZEROS[index % 3], ordered=index % 2 == 1)
    check(experts, COUNTS[counts], torch.float32 if index % 2 else torch.float16)


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("kind", TYPES)
def test_matrices_of_all_types(kind, zeros):
    layout = list(LAYOUTS.values())[(TYPES.index(kind) + ZEROS.index(zeros)) % len(LAYOUTS)]
    check(random_experts(kind, 3, *layout, zeros, ordered=zeros == "integer"), (2, 0, 3), torch.float32)


@pytest.mark.parametrize("count", [1, 5, 130])
def test_any_number_of_experts(count):
    """The kernel looks for a row's expert in as many places as the next power of two."""
    counts = [index % 3 for index in range(count)]
    check(random_experts("u4", count, 3, 64, 32, "fraction"), [*counts[:-1], 2], torch.float32)


def test_rows_past_the_last_end_are_left_out():
    experts = random_experts("u4", 3, 5, 64, 32)
    coded, x = encode_experts(experts, CPU), torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    x[4:] = torch.nan
    found = KERNELS.grouped(x, torch.tensor([1, 1, 4], dtype=torch.int32), coded)
    torch.testing.assert_close(found[:4], by_expert(experts, x[:4], (1, 0, 3)), atol=1e-4, rtol=1e-4)


@pytest.mark.long
@torch.inference_mode()
def test_a_model(tmp_path):
    """Its kernels are tested before they are used, as on a GPU."""
    quantized, dense = write_pair(tmp_path, "qwen3 moe", "GPTQ, act-order")
    model, summary = held(open_written(quantized), KERNELS)
    assert summary == "31 as stored in u4"
    expected = decoded(open_written(dense))
    for counts in ((1,), (3, 5)):
        torch.testing.assert_close(logits(model, *counts), logits(expected, *counts), atol=1e-3, rtol=1e-3)
