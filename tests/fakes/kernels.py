"""Kernels in plain torch that count their launches."""

from collections import Counter

from engine_worker.layers.fusion import Kernels
from engine_worker.layers.mlp import gated
from engine_worker.layers.norm import normed
from engine_worker.layers.rotary import rotate


class CountedKernels:
    """`kernels` are what a model is fused with, `launches` how often each was used."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.kernels = Kernels(self._norm, self._turn, self._gate)

    def _norm(self, x, update, weight, eps):
        self.launches["norm"] += 1
        if update is not None:
            x += update
        return normed(x, weight, eps)

    def _turn(self, x, rotations, weight, eps):
        self.launches["turn"] += 1
        return rotate(x if weight is None else normed(x, weight, eps), rotations)

    def _gate(self, x):
        self.launches["gate"] += 1
        return gated(x)
