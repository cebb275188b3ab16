"""How much the setting `quantize` changes the matrices of a model, and so what it generates."""

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from engine_worker.formats.rounding import rounding_of

ROWS = 16
"""Rows of each matrix that are measured. All are rounded alike."""
BOUND = 0.02
"""Of the mean: errors of this size already change a tenth of the tokens of a small model (docs/operations.md)."""
EXPERTS = ".experts."


class RoundingError:
    """Relative to the sizes of the values, over all matrices. The same on every device."""

    def __init__(self, quantize: str) -> None:
        self._quantize = quantize
        self._squares: list[float] = []
        """One for each matrix."""

    def add(self, name: str, matrix: Tensor) -> None:
        """matrix: not rounded yet. Of the experts of a layer, of which there may be hundreds, the first counts."""
        rounding = rounding_of(self._quantize, name)
        if rounding is None or (EXPERTS in name and f"{EXPERTS}0." not in name):
            return
        rows = matrix[:: -(-len(matrix) // ROWS)].float().cpu()
        size, error = rows.square().sum(), (rounding(rows).decode() - rows).square().sum()
        self._squares.append(float(error / size) if size else 0.0)

    def add_all(self, matrices: Mapping[str, Tensor]) -> None:
        for name, matrix in matrices.items():
            self.add(name, matrix)

    @property
    def mean(self) -> float:
        """Quadratic, since errors of different matrices are independent."""
        return math.sqrt(sum(self._squares) / max(1, len(self._squares)))

    def report(self, model: str, warn: Callable[[str, str], None]) -> None:
        """Warn if it is large. `warn`: called with a log event and a reason."""
        if self.mean > BOUND:
            warn(
                "weights_rounded_coarsely",
                f"quantize = {self._quantize} changes the weights of {model} by {self.mean:.1%}: the model will often "
                "choose other tokens. docs/operations.md has the measured loss of each precision",
            )
