"""Fused kernels in plain torch that count their launches."""

from collections import Counter

import torch.nn.functional as F

from engine_worker.layers.layer import FusedKernels
from engine_worker.layers.mlp import silu_and_mul
from engine_worker.layers.norm import rms_norm
from engine_worker.layers.rotary import rotate


class CountedKernels:
    """`kernels` can be passed to a model in place of the fused ones. `launches` counts calls by kernel name."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.kernels = FusedKernels(self._norm, self._rotate, self._gate, self._product)

    def _norm(self, x, update, weight, eps):
        self.launches["norm"] += 1
        if update is not None:
            x += update
        return rms_norm(x, weight, eps)

    def _rotate(self, x, rotations, weight, eps):
        self.launches["rotate"] += 1
        return rotate(x if weight is None else rms_norm(x, weight, eps), rotations)

    def _gate(self, x):
        self.launches["gate"] += 1
        return silu_and_mul(x)

    def _product(self, x, weight):
        self.launches["product"] += 1
        return F.linear(x, weight)
