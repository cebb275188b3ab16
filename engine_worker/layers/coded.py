"""Quantized matrices on a GPU: products with the codes that the checkpoint stores.

A weight is decoded where it is multiplied, to the very value that it would have in a dense matrix of the model's dtype,
for any number of rows. So a product differs from one with the decoded matrix only in the order of its sums, as products
of different numbers of rows differ from each other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.formats.packing import pack_pairs, unpack_pairs
from engine_worker.formats.stored import BYTE_MAX, PAIRS, TABLES, Stored, stack, with_zeros
from engine_worker.layers.packing import Product

TYPES = ("u4", "i4", *TABLES, "u8", "i8", "f8e4m3")
RUN, LEAST_RUN = 64, 16
"""Columns that a kernel decodes together, all of one group: at most, and at least (a product of Tensor Cores)."""
FEW_ROWS = 128
"""For more rows, reading a decoded matrix costs less than decoding it once for each tile of rows."""
ALIGNED = 16
BUFFER_BYTES = 256 << 20
"""Of the buffer for decoded matrices; a larger matrix is decoded in parts."""
ENCODED = 1 << 14
"""Rows that are put in the kernels' layout at a time, which takes more memory than the codes."""


@dataclass(frozen=True, slots=True)
class Coded:
    """N outputs of K inputs, as the kernels read them; see `Stored`."""

    type: str
    codes: Tensor
    """[N, width] uint8, whole runs. With two codes in a byte, each 2 * `run` columns are `run` bytes: the first half in
    the low bits, the second in the high ones. Columns past K have any code."""
    scales: Tensor
    """[N, groups] of the shortest type that has the values."""
    zeros: Tensor | None
    """Like `scales`; integers are uint8."""
    order: Tensor | None
    """[K] int64."""
    table: Tensor | None
    """[16] float32, the numbers that codes of TABLES stand for."""
    inputs: int
    group: int
    """0: one for each row."""
    run: int

    @property
    def outputs(self) -> int:
        return len(self.codes)

    @property
    def paired(self) -> bool:
        return self.type in PAIRS

    def rows(self, start: int, end: int) -> "Coded":
        zeros = None if self.zeros is None else self.zeros[start:end]
        return replace(self, codes=self.codes[start:end], scales=self.scales[start:end], zeros=zeros)

    @property
    def variant(self) -> tuple[object, ...]:
        """What a kernel is compiled for."""
        zeros = None if self.zeros is None else self.zeros.dtype
        return self.type, self.group, self.run, self.scales.dtype, zeros, self.inputs % LEAST_RUN == 0


def run_of(stored: Stored) -> int:
    """Columns that always share a group."""
    return RUN if stored.group >= stored.shape[1] else math.gcd(stored.group, RUN)


def refused(stored: Stored) -> str | None:
    """Why there is no product with this matrix; None: there is one."""
    if stored.type not in TYPES:
        return stored.type
    if run_of(stored) < LEAST_RUN:
        return f"groups of {stored.group}"
    return None


def encode(stored: Stored, device: torch.device) -> Coded:
    """The same matrix for the kernels. It must not be `refused`."""
    inputs, run, paired = stored.shape[1], run_of(stored), stored.type in PAIRS
    parts = stored.codes.view(torch.uint8).split(ENCODED)
    zeros, order = stored.zeros, stored.order
    return Coded(
        stored.type,
        torch.cat([_in_runs(part.to(device), run, paired=paired) for part in parts]),
        _narrow(stored.scales).to(device),
        None if zeros is None else _narrow_zeros(zeros).to(device),
        None if order is None else order.to(device),
        torch.tensor(TABLES[stored.type], device=device) if stored.type in TABLES else None,
        inputs,
        0 if stored.group >= inputs else stored.group,
        run,
    )


def _in_runs(codes: Tensor, run: int, *, paired: bool) -> Tensor:
    """Rows as a checkpoint stores them -> `Coded.codes`."""
    if not paired:
        return F.pad(codes, (0, -codes.shape[1] % run))
    codes = unpack_pairs(codes)
    halves = F.pad(codes, (0, -codes.shape[1] % (2 * run))).view(len(codes), -1, 2, run)
    return pack_pairs(halves.transpose(2, 3)).view(len(codes), -1)


def _narrow(numbers: Tensor) -> Tensor:
    for dtype in (torch.bfloat16, torch.float16):
        short = numbers.to(dtype)
        if torch.equal(short.float(), numbers):
            return short
    return numbers.contiguous()


def _narrow_zeros(zeros: Tensor) -> Tensor:
    short = zeros.clamp(0, BYTE_MAX).to(torch.uint8)
    return short if torch.equal(short.float(), zeros) else _narrow(zeros)


@dataclass(frozen=True, slots=True)
class CodedExperts:
    """A matrix of each expert, all of one shape and kind."""

    matrix: Coded
    """The rows of all experts in turn, without an order."""
    order: Tensor | None
    """[experts, K] int32: the input of each column."""
    count: int

    @property
    def outputs(self) -> int:
        """Of one expert."""
        return self.matrix.outputs // self.count

    @property
    def variant(self) -> tuple[object, ...]:
        """What a kernel is compiled for."""
        return *self.matrix.variant, self.order is not None, self.count


def encode_experts(experts: Sequence[Sequence[Stored]], device: torch.device) -> CodedExperts | None:
    """The rows of each expert's matrices in turn, none of which is `refused`. None if they are not of one kind."""
    parts = [part for expert in experts for part in expert]
    if len({part.type for part in parts}) > 1:
        # Where the zeros of integers only make up for a sign, readers leave them out: in one matrix, and not in others.
        parts = [with_zeros(part) for part in parts]
    whole = stack([replace(part, order=None) for part in parts])
    if whole is None:
        return None
    order = None
    if any(part.order is not None for part in parts):
        plain = torch.arange(whole.shape[1])
        orders = torch.stack([plain if part.order is None else part.order for part in parts])
        each = orders.view(len(experts), -1, whole.shape[1])
        if not torch.equal(each, each[:, :1].expand_as(each)):
            return None
        order = each[:, 0].to(device, torch.int32)
    return CodedExperts(encode(whole, device), order, len(experts))


class CodedKernels(NamedTuple):
    product: Callable[[Tensor, Coded, Tensor | None], Tensor]
    """(x [T, inputs], in the order of the columns, matrix, bias [outputs] or None) -> [T, outputs], for up to FEW_ROWS
    rows. Weights are rounded to x's dtype, sums are float32."""
    decode: Callable[[Coded, Tensor | None, Tensor], None]
    """(matrix, rows [R] int64 or None for all, out [R, inputs]): writes those rows, in the order of the columns,
    rounded to the dtype of `out`."""
    grouped: Callable[[Tensor, Tensor, CodedExperts], Tensor]
    """(x [S, inputs], sorted by expert, ends [experts] int32, where each expert's rows end, matrices) -> [S, outputs],
    undefined past the last end. Does not wait for the device. Weights and sums as in `product`."""


class Buffer:
    """Memory for one decoded matrix at a time, of any layer: their products run one after the other."""

    def __init__(self, dtype: torch.dtype, device: torch.device, max_bytes: int = BUFFER_BYTES) -> None:
        self._max_bytes = max_bytes
        self._memory = torch.empty(0, dtype=dtype, device=device)

    def reserve(self, matrix: Coded) -> None:
        """Call before the first product, whose memory a CUDA graph may refer to."""
        size = min(self.rows(matrix), matrix.outputs) * matrix.inputs
        if size > self._memory.numel():
            self._memory = self._memory.new_empty(size)

    def rows(self, matrix: Coded) -> int:
        """How many are decoded at a time: so many that each part's arrays are aligned like the whole's, for which the
        kernels are compiled."""
        fitting = self._max_bytes // (matrix.inputs * self._memory.itemsize)
        return max(ALIGNED, fitting - fitting % ALIGNED)

    def take(self, rows: int, columns: int) -> Tensor:
        return self._memory[: rows * columns].view(rows, columns)


class CodedProduct:
    """y = x Wᵀ + b; a `Product`."""

    def __init__(self, matrix: Coded, kernels: CodedKernels, buffer: Buffer) -> None:
        buffer.reserve(matrix)
        self.matrix = matrix
        self._kernels = kernels
        self._buffer = buffer

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        matrix = self.matrix
        x = x.contiguous() if matrix.order is None else x.index_select(1, matrix.order)
        if len(x) <= FEW_ROWS:
            return self._kernels.product(x, matrix, bias)
        step = self._buffer.rows(matrix)
        parts = [
            self._by_buffer(x, bias, slice(i, min(i + step, matrix.outputs))) for i in range(0, matrix.outputs, step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _by_buffer(self, x: Tensor, bias: Tensor | None, part: slice) -> Tensor:
        rows = self.matrix.rows(part.start, part.stop)
        dense = self._buffer.take(rows.outputs, rows.inputs)
        self._kernels.decode(rows, None, dense)
        return F.linear(x, dense, None if bias is None else bias[part])


@dataclass(frozen=True, slots=True)
class DenseProduct:
    """The same with a matrix that is not quantized, as a part of a `JoinedProduct`."""

    weight: Tensor

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)


@dataclass(frozen=True, slots=True)
class JoinedProduct:
    """The outputs of several matrices in turn, where these are not of one kind."""

    products: Sequence[Product]
    sizes: Sequence[int]
    """Outputs of each."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        biases = [None] * len(self.sizes) if bias is None else bias.split(list(self.sizes))
        return torch.cat([product(x, part) for product, part in zip(self.products, biases, strict=True)], 1)


@dataclass(frozen=True, slots=True)
class CodedTable:
    """Embeddings that are decoded when they are looked up; a `Table`. Its inputs are in order."""

    product: CodedProduct
    kernels: CodedKernels
    dtype: torch.dtype

    def __call__(self, rows: Tensor) -> Tensor:
        matrix = self.product.matrix
        out = torch.empty((len(rows), matrix.inputs), dtype=self.dtype, device=rows.device)
        self.kernels.decode(matrix, rows, out)
        return out


@dataclass(frozen=True, slots=True)
class CodedGroup:
    """A `GroupedProduct`."""

    experts: CodedExperts
    kernels: CodedKernels

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.kernels.grouped(x, ends, self.experts)
