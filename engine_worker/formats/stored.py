"""A quantized matrix as a checkpoint stores it: codes, and a scale and zero for each row and group of columns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engine_worker.formats.packing import unpack_pairs

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""f4e2m1, as in the Open Compute Project's specification of microscaling formats."""
NORMAL4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""nf4, as in QLoRA (arXiv:2305.14314)."""
TABLES = {"f4e2m1": FLOAT4, "nf4": NORMAL4}
"""Element types whose codes are indices of a table."""
PAIRS = ("u4", "i4", *TABLES)
"""Element types with two codes in each byte."""
BYTE_MAX = 255


@dataclass(frozen=True, slots=True)
class Stored:
    """N outputs of K inputs: value[n, order[k]] = (codes[n, k] - zeros[n, g]) * scales[n, g], where g = k // group."""

    type: str
    """Element type, as OpenVINO names it: one of PAIRS, u8, i8, f8e4m3 or f8e5m2."""
    codes: Tensor
    """[N, K]; [N, K / 2] uint8 for PAIRS, the first of two codes in the low bits."""
    scales: Tensor
    """[N, ceil(K / group)] float32. A scale of several rows is repeated for each of them, so that rows can be cut and
    stacked."""
    zeros: Tensor | None
    """Like `scales`, in units of the codes, not necessarily integers. None: 0."""
    group: int
    """Columns that share a scale. The last group may be shorter."""
    order: Tensor | None = None
    """[K] int64: the input of each column, if they are not in order (GPTQ's act-order)."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.codes.shape
        return rows, width * (2 if self.type in PAIRS else 1)

    def decode(self) -> Tensor:
        """[N, K] float32, the meaning of the matrix: every product is tested against it."""
        values = self._values()
        if self.zeros is not None:
            values -= self._by_column(self.zeros)
        values *= self._by_column(self.scales)
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)

    def rows(self, index: Tensor | slice) -> "Stored":
        """Some rows, in the order of `index`."""
        zeros = None if self.zeros is None else self.zeros[index]
        return replace(self, codes=self.codes[index], scales=self.scales[index], zeros=zeros)

    def columns(self, start: int, end: int) -> "Stored":
        """Columns in whole bytes, of a matrix whose inputs are in order. If `start` cuts a group, all groups become
        smaller ones with the same scales."""
        width = 2 if self.type in PAIRS else 1
        codes = self.codes[:, start // width : end // width]
        if self.group >= self.shape[1]:
            return replace(self, codes=codes, group=end - start)
        group = math.gcd(self.group, start)

        def cut(numbers: Tensor) -> Tensor:
            finer = numbers.repeat_interleave(self.group // group, dim=1)
            return finer[:, start // group : -(-end // group)]

        zeros = None if self.zeros is None else cut(self.zeros)
        return replace(self, codes=codes, scales=cut(self.scales), zeros=zeros, group=group)

    def with_rows(self, count: int) -> "Stored":
        """The same followed by rows of zeros, `count` in all."""

        def longer(numbers: Tensor) -> Tensor:
            return _joined([numbers, numbers.new_zeros(count - len(numbers), numbers.shape[1])])

        zeros = None if self.zeros is None else longer(self.zeros)
        return replace(self, codes=longer(self.codes), scales=longer(self.scales), zeros=zeros)

    def _values(self) -> Tensor:
        """The numbers that the codes stand for, [N, K] float32."""
        if self.type not in PAIRS:
            return self.codes.float()
        codes = unpack_pairs(self.codes)
        if self.type in TABLES:
            return torch.tensor(TABLES[self.type])[codes.long()]
        return ((codes ^ 8).to(torch.int8) - 8 if self.type == "i4" else codes).float()

    def _by_column(self, numbers: Tensor) -> Tensor:
        if numbers.shape[1] == 1:
            return numbers
        return numbers.repeat_interleave(self.group, dim=1)[:, : self.shape[1]]


class Kind(NamedTuple):
    """What a consumer's way of computing with a matrix depends on."""

    type: str
    group: int | None
    """None: one for each row."""
    zeros: Literal["none", "integer", "fraction"]
    ordered: bool
    """Whether the inputs have an order of their own."""


def kind_of(stored: Stored) -> Kind:
    group = None if stored.group >= stored.shape[1] else stored.group
    zeros: Literal["none", "integer", "fraction"] = "none"
    if stored.zeros is not None:
        whole = bool(((stored.zeros == stored.zeros.round()) & (stored.zeros >= 0) & (stored.zeros <= BYTE_MAX)).all())
        zeros = "integer" if whole else "fraction"
    return Kind(stored.type, group, zeros, stored.order is not None)


def stack(parts: Sequence[Stored]) -> Stored | None:
    """The rows of all parts in turn; None if these are not of one kind."""
    first = parts[0]
    same = all((each.type, each.group) == (first.type, first.group) for each in parts)
    if not same or not all(_equal(first.order, each.order) for each in parts):
        return None
    zeros = None
    if any(each.zeros is not None for each in parts):
        zeros = torch.cat([torch.zeros_like(each.scales) if each.zeros is None else each.zeros for each in parts])
    codes, scales = (_joined([getattr(each, name) for each in parts]) for name in ("codes", "scales"))
    return replace(first, codes=codes, scales=scales, zeros=zeros)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts in turn. Those that follow each other in a checkpoint's file are not copied."""
    first = parts[0]
    if all(_follows(one, other) for one, other in pairwise(parts)):
        return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
    # As bytes: not every device joins 8-bit floats.
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _follows(one: Tensor, other: Tensor) -> bool:
    """Whether `other` begins where `one` ends, in the same memory."""
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.dtype == other.dtype
    return (
        same
        and one.is_contiguous()
        and other.is_contiguous()
        and one.shape[1:] == other.shape[1:]
        and one.data_ptr() + one.nbytes == other.data_ptr()
    )


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def with_zeros(stored: Stored) -> Stored:
    """The same matrix with unsigned codes, and so with zeros, if its codes are signed integers."""
    middle = {"i4": 8.0, "i8": 128.0}.get(stored.type)
    if middle is None:
        return stored
    zeros = torch.full_like(stored.scales, middle) if stored.zeros is None else stored.zeros + middle
    if stored.type == "i4":
        # Each nibble plus 8, which as a number without a sign differs in the highest bit.
        return replace(stored, type="u4", codes=stored.codes ^ 0x88, zeros=zeros)
    return replace(stored, type="u8", codes=stored.codes.view(torch.uint8) ^ 0x80, zeros=zeros)


def random_stored(kind: Kind, rows: int, columns: int, seed: int) -> Stored:
    """Every code, with values about 0.1 in size."""
    random = torch.Generator().manual_seed(seed)
    group = columns if kind.group is None else math.gcd(columns, kind.group)
    middle, spread = {"u4": (8, 5), "i4": (0, 5), "u8": (128, 74), "i8": (0, 74)}.get(kind.type, (0, 2))
    codes = torch.randint(0, 256, (rows, columns // 2 if kind.type in PAIRS else columns), generator=random)
    scales = (0.5 + torch.rand(rows, columns // group, generator=random)) * 0.1 / spread
    zeros = None
    if kind.zeros != "none":
        zeros = middle + torch.randint(-2, 3, scales.shape, generator=random).float()
        zeros += 0.0 if kind.zeros == "integer" else 0.25
    order = torch.randperm(columns, generator=random) if kind.ordered else None
    stored = codes.to(torch.uint8)
    return Stored(kind.type, stored.view(torch.int8) if kind.type == "i8" else stored, scales, zeros, group, order)
