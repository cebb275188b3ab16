"""The residual stream after single layers, for clients."""

from collections.abc import Collection

from torch import Tensor


class Taps:
    """Of one step: copies the rows of some tokens where the layers' outputs are."""

    def __init__(self, layers: Collection[int], tokens: Tensor | None) -> None:
        """`tokens`: [K] int64, indices within the step."""
        self._layers = layers
        self._tokens = tokens
        self.found: dict[int, Tensor] = {}
        """[K, hidden], by layer."""

    def add(self, layer: int, x: Tensor, update: Tensor) -> None:
        """See `DecoderLayer`: the residual stream [T, hidden], and what is still to be added to it."""
        if layer in self._layers and self._tokens is not None:
            self.found[layer] = x.index_select(0, self._tokens) + update.index_select(0, self._tokens)
