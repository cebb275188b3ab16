"""Which kinds of quantized matrices a model has: what is tested before its weights are loaded must be what is loaded
then."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from engine_worker.attention.reference import ReferenceAttention
from engine_worker.formats.source import find_weights
from engine_worker.formats.stored import Kind, Stored, kind_of, random_stored, with_zeros
from engine_worker.layers.shard import UNSHARDED, Place
from engine_worker.models.config import DecoderConfig
from engine_worker.models.decoder import EMBEDDING, TIED, CausalLM
from engine_worker.openvino.matrices import canonical, keeps, rounds_activations
from engine_worker.runner.weights import CheckpointWeights, ignore_progress, open_weights
from sluice.checkpoint.folder import Checkpoint

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
META = torch.device("meta")
ZEROS = ("qzeros", "weight_zero_point")
"""Parts of a matrix that may have zero points."""

LayerKinds = tuple[tuple[str, Kind], ...]
"""Of the quantized matrices of a layer, by their names within the layer."""


class Kinds(NamedTuple):
    """Matrices that are plain, or that are decoded, are missing."""

    layers: tuple[LayerKinds, ...] = ()
    """Empty: no layer has any."""
    embedding: Kind | None = None
    head: Kind | None = None
    """None also if it is the embedding."""

    @property
    def rounds_activations(self) -> bool:
        found = [kind for layer in self.layers for _, kind in layer]
        return any(rounds_activations(kind) for kind in (*found, self.embedding, self.head) if kind is not None)

    @property
    def summary(self) -> str:
        """For the log."""
        counts = Counter(kind.type for kind in self.by_name.values())
        return ", ".join(f"{count} as stored in {kind}" for kind, count in counts.most_common()) or "none as stored"

    @property
    def by_name(self) -> dict[str, Kind]:
        found = {EMBEDDING: self.embedding, TIED: self.head}
        for layer, kinds in enumerate(self.layers):
            found |= {f"model.layers.{layer}.{name}": kind for name, kind in kinds}
        return {name: kind for name, kind in found.items() if kind is not None}


NO_KINDS = Kinds()


def find_kinds(checkpoint: Checkpoint, config: DecoderConfig) -> Kinds:
    """Reads one matrix of each size and format. Raises CheckpointError."""
    if all(weight.whole is not None for weight in find_weights(checkpoint.path).values()):
        # Before what compares the values of a head with those of the embedding, as loading does again.
        return NO_KINDS
    model = CausalLM(config, ReferenceAttention(config.heads), Place(torch.float32, META, UNSHARDED))
    seen: dict[object, Kind | None] = {}
    found: dict[str, Kind | None] = {}
    with open_weights(model, checkpoint, ignore_progress) as weights:
        for name, weight in weights.quantized.items():
            parts = tuple(sorted((part, place.type, place.shape) for part, place in weight.parts.items()))
            match = LAYER.fullmatch(name)
            form = (match[2] if match else name), parts
            if form not in seen:
                stored = weights.read(name)
                # Other matrices with zero points may have some that this one happens not to have.
                stored = with_zeros(stored) if {*ZEROS} & weight.parts.keys() else canonical(stored)
                seen[form] = kind_of(stored) if keeps(stored) else None
            found[name] = seen[form]
    layers: list[dict[str, Kind]] = [{} for _ in config.windows]
    for name, kind in found.items():
        if (match := LAYER.fullmatch(name)) and kind is not None:
            layers[int(match[1])][match[2]] = kind
    kinds = tuple(tuple(sorted(layer.items())) for layer in layers)
    return Kinds(kinds if any(kinds) else (), found.get(EMBEDDING), found.get(TIED))


class LoadedMatrices:
    """Those of a checkpoint, each of which is read when its turn comes."""

    def __init__(self, weights: CheckpointWeights, targets: Mapping[str, Tensor], kinds: Kinds) -> None:
        self._weights = weights
        self._targets = targets
        self._kinds = kinds.by_name
        self.unexpected: list[str] = []
        """Names of matrices of another kind than that which was tested. They are decoded."""
        self.stored: set[str] = set()
        """Names of matrices that were read as stored: the model does not have their values."""

    def read(self, name: str) -> Stored | None:
        if name not in self._weights.quantized:
            return None
        stored, expected = self._weights.read(name), self._kinds.get(name)
        if expected is not None:
            stored = with_zeros(stored) if expected.zeros == "integer" else canonical(stored)
            if fits(kind_of(stored), expected):
                self.stored.add(name)
                return stored
            self.unexpected.append(name)
        self._targets[name].copy_(stored.decode())
        return None


def fits(kind: Kind, expected: Kind) -> bool:
    """Whether what was tested with `expected` holds for `kind`. Zeros may happen to be integers."""
    same = kind._replace(zeros=expected.zeros) == expected
    return same and (kind.zeros == expected.zeros or (kind.zeros, expected.zeros) == ("integer", "fraction"))


class RandomMatrices:
    """Random ones for a model."""

    def __init__(self, targets: Mapping[str, Tensor], kinds: Kinds) -> None:
        self._kinds = kinds.by_name
        self._targets = targets

    def read(self, name: str) -> Stored | None:
        if name not in self._kinds:
            return None
        rows, columns = self._targets[name].shape
        return random_stored(self._kinds[name], rows, columns, crc32(name.encode()))
