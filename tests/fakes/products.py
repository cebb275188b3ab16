"""Libraries of matrix products: one whose rows have the same bits in every batch on any CPU, and one on none."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.layers.packing import Library, Product

Where = Callable[[int], Tensor | slice]
"""Rows of a batch of so many that get other bits."""


def exact(name: str = "exact", exists: bool = True) -> Library:
    """Each row by itself."""

    def pack(weight: Tensor) -> Product:
        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            rows = [F.linear(row.unsqueeze(0), weight, bias) for row in x]
            return torch.cat(rows) if rows else x.new_empty(0, len(weight))

        return product

    return Library(name, lambda: exists, pack)


def inexact(where: Where, name: str = "inexact") -> Library:
    """The next number above the exact one, in some rows."""

    def pack(weight: Tensor) -> Product:
        true = exact().pack(weight)

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            found, rows = true(x, bias), where(len(x))
            found[rows] = torch.nextafter(found[rows], torch.tensor(torch.inf))
            return found

        return product

    return Library(name, lambda: True, pack)


def other_in_small_batches(rows: int) -> slice:
    """As MKL on AMD, where 1 to 3 rows are computed by another kernel."""
    return slice(None) if rows < 4 else slice(0)
