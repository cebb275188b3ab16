"""Copies of the residual stream after single layers, which clients can request as tensors."""

from collections.abc import Collection

from torch import Tensor


class Taps:
    """Copies the outputs of `layers` for some of a step's tokens."""

    def __init__(self, layers: Collection[int], tokens: Tensor | None) -> None:
        """`tokens`: [K] int64, indexes in the step; None: copy nothing."""
        self._layers = layers
        self._tokens = tokens
        self.rows: dict[int, Tensor] = {}
        """Output [K, hidden] by layer."""

    def add(self, layer: int, x: Tensor, update: Tensor) -> None:
        """Record a layer's output x + update, both [T, hidden]; see `DecoderLayer`."""
        if layer in self._layers and self._tokens is not None:
            self.rows[layer] = x.index_select(0, self._tokens) + update.index_select(0, self._tokens)
