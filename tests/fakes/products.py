"""Matrix product libraries that are batch-invariant on every CPU, and ones that are on none."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.layers.packing import Library, Product

Where = Callable[[int], Tensor | slice]
"""Maps the number of rows in a batch to the rows whose results differ in their last bit."""


def exact(name: str = "exact", exists: bool = True) -> Library:
    """Batch-invariant: computes each row by itself."""

    def pack(weight: Tensor) -> Product:
        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            rows = [F.linear(row.unsqueeze(0), weight, bias) for row in x]
            return torch.cat(rows) if rows else x.new_empty(0, len(weight))

        return product

    return Library(name, lambda: exists, pack)


def inexact(where: Where, name: str = "inexact") -> Library:
    """Returns the next larger float in some rows."""

    def pack(weight: Tensor) -> Product:
        exact_product = exact().pack(weight)

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            result, rows = exact_product(x, bias), where(len(x))
            result[rows] = torch.nextafter(result[rows], torch.tensor(torch.inf))
            return result

        return product

    return Library(name, lambda: True, pack)


def other_in_small_batches(rows: int) -> slice:
    """All rows of batches below 4, as with MKL on AMD CPUs, which uses another kernel for 1 to 3 rows."""
    return slice(None) if rows < 4 else slice(0)
