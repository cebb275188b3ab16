"""Loads weights from a checkpoint's files: one at a time, only this rank's slice, directly to its device.

A quantized matrix is decoded on the host, and is then as dense as any other.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from engine_worker.formats.source import Files, Rename, find_weights, same_name
from engine_worker.formats.stored import Stored
from engine_worker.formats.weight import FLOATS, Place, Weight
from engine_worker.layers.shard import Cut
from engine_worker.models.decoder import EMBEDDING, TIED, CausalLM
from engine_worker.models.model import Model, SelfLoading
from engine_worker.runner.config import RunnerConfig
from engine_worker.vision.names import decoder_name
from sluice.checkpoint.errors import CheckpointError, listed
from sluice.checkpoint.folder import Checkpoint
from sluice.checkpoint.quantization import Quantization

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""
ROWS = 4096
"""Rows of a matrix that are compared at once."""
Cuts = Mapping[str, Cut]
"""By name of a target: which slice of the checkpoint's tensor it holds. Targets not listed hold the whole tensor."""


def ignore_progress(_done: int, _total: int) -> None:
    """A `Progress` that drops the reports."""


class CheckpointWeights:
    """The weights of a checkpoint's files, for the targets of a model. A context manager.

    Derived tensors (rotary frequencies, a head that equals the embedding) are ignored.
    """

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, Tensor],
        progress: Progress,
        cuts: Cuts = {},  # noqa: B006
        rename: Rename = same_name,
        quantization: Quantization | None = None,
    ) -> None:
        """Reads the headers. Raises CheckpointError on files that are missing or broken, and on weights that are
        missing, unexpected, or of the wrong shape or type."""
        self._targets = targets
        self._cuts = cuts
        self._quantization = quantization
        self._weights = find_weights(folder, rename)
        # Check all headers before the first tensor, which may be large, is read.
        _check_names(folder, targets, self._weights)
        for name, target in targets.items():
            _check_header(self._weights[name], whole_shape(target, cuts.get(name)))
        files = {place.file for weight in self._weights.values() for place in weight.places}
        self._progress = progress
        self._total = sum(file.stat().st_size for file in files)
        self._done = 0
        self.quantized: Mapping[str, Weight] = {
            name: weight for name, weight in self._weights.items() if name in targets and weight.whole is None
        }
        """The weights that are quantized, by the names of their targets."""
        # Targets that the layers read by themselves are on no device.
        devices = (str(target.device) for target in targets.values() if not target.is_meta)
        self._files = Files(next(devices, "cpu"))
        self.mapped = self._files.mapped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.__exit__(*exception)

    def fill_plain(self, but: Collection[str] = ()) -> None:
        """`but`: those that are left out."""
        for name, weight in self._weights.items():
            if weight.whole is not None and name in self._targets and name not in but:
                self._targets[name].copy_(self.plain(name))

    def fill(self, but: Collection[str] = ()) -> None:
        """Fill every target, or all `but` some."""
        self.fill_plain(but)
        for name in self.quantized:
            if name not in but:
                self._targets[name].copy_(self.read(name).decode()[self._slices(name)])
        self.finish()

    def finish(self) -> None:
        """Report that all is done. Headers, and what is not loaded, are in the total but were not counted."""
        self._progress(self._total, self._total)

    def plain(self, name: str) -> Tensor:
        """The slice of a weight that is not quantized, in its own type. Raises CheckpointError."""
        weight = self._weights[name]
        if weight.whole is None:
            raise CheckpointError(f"{name} is quantized")
        tensor = self._files.plain(weight.whole, self._slices(name))
        self._count(weight)
        return tensor

    def read(self, name: str) -> Stored:
        """The whole quantized matrix. Raises CheckpointError."""
        weight, shape = self._weights[name], whole_shape(self._targets[name], self._cuts.get(name))
        stored = self._files.stored(name, weight, tuple(shape), self._quantization)
        self._count(weight)
        return stored

    def _slices(self, name: str) -> tuple[slice, ...]:
        cut = self._cuts.get(name)
        return () if cut is None else cut.slices

    def _count(self, weight: Weight) -> None:
        self._done += sum(place.num_bytes for place in weight.places)
        self._progress(min(self._done, self._total), self._total)


def random_weights(
    targets: dict[str, Tensor],
    seed: int,
    deviation: float,
    progress: Progress,
    cuts: Cuts = {},  # noqa: B006
) -> None:
    """Fill matrices with normal noise, norms with ones and biases with zeros."""
    generators: dict[torch.device, torch.Generator] = {}
    total = sum(target.nbytes for target in targets.values())
    done = 0
    for name, target in targets.items():
        if target.dim() == 1:
            target.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            device = target.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            cut = cuts.get(name)
            # Every rank samples the whole tensor and keeps its slice, so that several ranks have the weights of one.
            whole = target if cut is None else target.new_empty(whole_shape(target, cut))
            whole.normal_(0.0, deviation, generator=generators[device])
            if cut is not None:
                target.copy_(whole[cut.slices])
        progress(done := done + target.nbytes, total)


def random_deviation(checkpoint: Checkpoint) -> float:
    return float(checkpoint.config.get("initializer_range", 0.02))


def _check_names(folder: Path, targets: Mapping[str, Tensor], weights: Mapping[str, Weight]) -> None:
    missing, unexpected = targets.keys() - weights.keys(), weights.keys() - targets.keys() - {TIED}
    problems = [
        f"{kind}: {listed(wrong)}" for kind, wrong in (("missing", missing), ("unexpected", unexpected)) if wrong
    ]
    if problems:
        raise CheckpointError(f"the weights in {folder} do not fit the model; {'; '.join(problems)}")


def whole_shape(target: Tensor, cut: Cut | None) -> list[int]:
    """Shape of the tensor in the checkpoint."""
    shape = list(target.shape)
    if cut is not None:
        shape[cut.dim] = cut.span.total
    return shape


def _check_header(weight: Weight, shape: list[int]) -> None:
    """The parts of a quantized matrix are checked when they are read."""
    if weight.whole is None:
        return
    place = weight.whole
    if list(place.shape) != shape:
        raise CheckpointError(f"tensor {place.name} has shape {list(place.shape)}, the model needs {shape}")
    if place.type not in FLOATS:
        raise CheckpointError(f"tensor {place.name} has type {place.type}: only matrices may be quantized")


def fill_weights(model: Model, checkpoint: Checkpoint, config: RunnerConfig, progress: Progress) -> None:
    """Fill the model's weights, after which it can be called. Raises CheckpointError."""
    if config.weights == "random":
        random_weights(model.targets(), config.weights_seed, random_deviation(checkpoint), progress, model.cuts())
    elif isinstance(model, SelfLoading):
        model.load(checkpoint, progress)
    else:
        with open_weights(model, checkpoint, progress) as weights:
            weights.fill()
    model.freeze()


def open_weights(model: Model, checkpoint: Checkpoint, progress: Progress) -> CheckpointWeights:
    """The weights of a native model. Raises CheckpointError."""
    rename: Rename = same_name if checkpoint.vision is None else decoder_name
    if isinstance(model, CausalLM):
        rename = resolve_tied(model, checkpoint.path, rename)
    targets, cuts = model.targets(), model.cuts()
    return CheckpointWeights(checkpoint.path, targets, progress, cuts, rename, checkpoint.quantization)


def resolve_tied(model: CausalLM, folder: Path, rename: Rename) -> Rename:
    """For a model whose config.json ties the head to the embedding, although its files may disagree; decides as
    transformers does. Gives the model a head of its own if the files contain one whose values differ from the
    embedding's. Returns `rename`, extended to map the head to the embedding if the files contain only the head."""
    if not model.config.tie_word_embeddings:
        return rename
    weights = find_weights(folder, rename)
    if TIED not in weights:
        return rename
    if EMBEDDING not in weights:
        return lambda name: EMBEDDING if rename(name) == TIED else rename(name)
    if not _equal(weights[TIED].whole, weights[EMBEDDING].whole):
        model.untie()
    return rename


def _equal(one: Place | None, other: Place | None) -> bool:
    """Quantized matrices, for which there is no place, count as different."""
    if one is None or other is None or one.shape != other.shape:
        return False
    with Files("cpu") as files:
        parts = (slice(start, start + ROWS) for start in range(0, one.shape[0], ROWS))
        return all(torch.equal(*(files.plain(place, (part,)).float() for place in (one, other))) for part in parts)
