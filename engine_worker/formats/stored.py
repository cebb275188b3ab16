"""A quantized matrix as a checkpoint stores it: codes, and a scale and zero for each row and group of columns."""

from dataclasses import dataclass, replace

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
