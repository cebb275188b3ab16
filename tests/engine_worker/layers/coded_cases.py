"""Random quantized matrices, and their products in plain torch."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.formats.stored import PAIRS, Stored
from engine_worker.layers.coded import Coded, CodedExperts, CodedKernels

CPU = torch.device("cpu")
ZEROS = ("none", "integer", "fraction")
NAN = 127
"""The code, without sign, of f8e4m3."""


def random_matrix(
    kind: str, rows: int, columns: int, group: int, zeros: str = "none", *, ordered: bool = False, seed: int = 0
) -> Stored:
    """`zeros`: none, integer or fraction. The last group may be short."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2 if kind in PAIRS else columns), generator=random)
    if kind == "f8e4m3":
        codes[codes % 128 == NAN] = 0
    scales = (0.5 + torch.rand(rows, -(-columns // group), generator=random)) * columns**-0.5
    offsets = None
    if zeros != "none":
        offsets = torch.randint(0, 16, scales.shape, generator=random) + (0.3 if zeros == "fraction" else 0.0)
    order = torch.randperm(columns, generator=random) if ordered else None
    dtype = {"i8": torch.int8, "f8e4m3": torch.float8_e4m3fn}.get(kind, torch.uint8)
    return Stored(kind, codes.to(torch.uint8).view(dtype), scales, offsets, group, order)


class TorchKernels:
    """A stand-in for Triton's: `kernels` decodes by `Stored.decode`. `launches`: what was called."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.kernels = CodedKernels(self._product, self._decode, self._grouped)

    def _product(self, x: Tensor, matrix: Coded, bias: Tensor | None) -> Tensor:
        self.launches.append("product")
        return F.linear(x, dense(matrix).to(x.dtype), bias)

    def _decode(self, matrix: Coded, rows: Tensor | None, out: Tensor) -> None:
        self.launches.append("decode")
        out.copy_(dense(matrix if rows is None else picked(matrix, rows)))

    def _grouped(self, x: Tensor, ends: Tensor, experts: CodedExperts) -> Tensor:
        self.launches.append("grouped")
        weights = dense(experts.matrix).to(x.dtype).view(experts.count, experts.outputs, -1)
        if experts.order is not None:
            weights = torch.stack([in_place(*each) for each in zip(weights, experts.order, strict=True)])
        out = torch.full((len(x), experts.outputs), torch.nan, dtype=x.dtype)
        starts = [0, *ends.tolist()]
        for weight, start, end in zip(weights, starts, starts[1:], strict=False):
            out[start:end] = F.linear(x[start:end], weight)
        return out


def in_place(weight: Tensor, order: Tensor) -> Tensor:
    """Columns in the order of the inputs."""
    return torch.empty_like(weight).index_copy_(1, order.long(), weight)


def dense(matrix: Coded) -> Tensor:
    """[N, K] float32 in the order of the columns, from the kernels' layout."""
    codes, run = matrix.codes, matrix.run
    if matrix.paired:
        low_high = torch.stack((codes & 15, codes >> 4), 1).view(len(codes), 2, -1, run)
        flat = low_high.transpose(1, 2).reshape(len(codes), -1)
        codes = flat[:, ::2] | flat[:, 1::2] << 4
    codes = codes[:, : matrix.inputs // (2 if matrix.paired else 1)]
    dtype = {"i8": torch.int8, "f8e4m3": torch.float8_e4m3fn}.get(matrix.type, torch.uint8)
    zeros = None if matrix.zeros is None else matrix.zeros.float()
    return Stored(
        matrix.type, codes.contiguous().view(dtype), matrix.scales.float(), zeros, matrix.group or matrix.inputs
    ).decode()


def picked(matrix: Coded, rows: Tensor) -> Coded:
    parts = [matrix.rows(row, row + 1) for row in rows.tolist()]
    zeros = None if matrix.zeros is None else torch.cat([part.zeros for part in parts])
    codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
    return replace(matrix, codes=codes, scales=scales, zeros=zeros)


def in_order(stored: Stored) -> Tensor:
    """[N, K] float32 in the order of the columns."""
    values = stored.decode()
    return values if stored.order is None else values[:, stored.order]


def random_experts(
    kind: str, count: int, rows: int, columns: int, group: int, zeros: str = "none", *, ordered: bool = False
) -> list[list[Stored]]:
    """For each expert two matrices with the same order of inputs, of `rows` and 3 rows."""
    experts = []
    for seed in range(0, 2 * count, 2):
        first, second = (
            random_matrix(kind, size, columns, group, zeros, ordered=ordered, seed=seed + i)
            for i, size in enumerate((rows, 3))
        )
        experts.append([first, replace(second, order=first.order)])
    return experts


def by_expert(experts: Sequence[Sequence[Stored]], x: Tensor, counts: Sequence[int]) -> Tensor:
    """The products of each expert's rows with its decoded matrices."""
    products = [
        F.linear(share, torch.cat([part.decode() for part in parts]).to(x))
        for share, parts in zip(x.split(list(counts)), experts, strict=True)
    ]
    return torch.cat(products)
