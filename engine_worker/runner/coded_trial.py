"""Tests the kernels for quantized matrices on the device, with a matrix of the checkpoint."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.layers.coded import Coded, CodedExperts, CodedKernels
from engine_worker.runner.fusing import compare

TRIAL_OUTPUTS = 96
"""Rows of a matrix with which the kernels are tested: not a multiple of all tiles."""
TRIAL_ROWS = (1, 3, 17, 33, 65)
"""One for each tile of the kernels."""


def verify(kernels: CodedKernels, matrix: Coded, dense: Tensor, *, biased: bool) -> None:
    """`dense`: the same matrix decoded, in the order of its columns. Raises ValueError if the kernels compute something
    else, and any exception of a kernel or its compiler."""
    random = torch.Generator().manual_seed(0)
    chosen = torch.arange(matrix.outputs - 1, -1, -2, device=dense.device)
    for rows, expected in ((None, dense), (chosen, dense[chosen])):
        out = torch.empty_like(expected)
        kernels.decode(matrix, rows, out)
        if not torch.equal(out, expected):
            raise ValueError("in a test, weights were decoded to other values")
    bias = torch.randn(matrix.outputs, generator=random).to(dense) if biased else None
    for count in TRIAL_ROWS:
        x = torch.randn(count, matrix.inputs, generator=random).to(dense)
        compare("product with codes", kernels.product(x, matrix, bias), F.linear(x, dense, bias))


def some_experts(count: int) -> list[int]:
    """Those that have rows in the test; the others have none."""
    return sorted({0, count // 2, count - 1})


def verify_experts(kernels: CodedKernels, experts: CodedExperts, dense: Mapping[int, Tensor]) -> None:
    """`dense`: the matrices of `some_experts`, decoded, in the order of their inputs. Raises as `verify`."""
    random = torch.Generator().manual_seed(0)
    for rows in TRIAL_ROWS:
        # The tile is chosen by the mean of rows per expert.
        x = torch.randn(rows * experts.count, experts.matrix.inputs, generator=random).to(next(iter(dense.values())))
        counts = torch.zeros(experts.count, dtype=torch.int32)
        for expert in dense:
            counts[expert] = min(2 * rows + 1, len(x) - int(counts.sum()))
        found = kernels.grouped(x, counts.cumsum(0, dtype=torch.int32).to(x.device), experts)
        shares = x.split([*counts[list(dense)].tolist(), len(x) - int(counts.sum())])
        expected = torch.cat([F.linear(share, weight) for share, weight in zip(shares, dense.values(), strict=False)])
        compare("grouped product with codes", found[: len(expected)], expected)
