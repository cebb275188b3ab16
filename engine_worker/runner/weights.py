"""Loads weights from safetensors files: one tensor at a time, only this rank's slice, directly to its device."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_worker.layers.shard import Cut
from engine_worker.models.decoder import EMBEDDING, TIED, CausalLM
from engine_worker.models.model import Model, SelfLoading
from engine_worker.runner.config import RunnerConfig
from engine_worker.vision.names import decoder_name
from sluice.checkpoint.folder import Checkpoint, CheckpointError, listed, weight_files

FLOATS = ("BF16", "F16", "F32", "F64")
"""Names in safetensors of the types that are not quantized."""
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""
Rename = Callable[[str], str | None]
"""Maps the name of a tensor in a file to a target's name; None: the tensor belongs to another part of the model."""
ROWS = 4096
"""Rows of a matrix that are compared at once."""
Cuts = Mapping[str, Cut]
"""By name of a target: which slice of the checkpoint's tensor it holds. Targets not listed hold the whole tensor."""


def ignore_progress(_done: int, _total: int) -> None:
    """A `Progress` that drops the reports."""


def same_name(name: str) -> str:
    return name


@contextmanager
def opened(file: Path, device: str = "cpu") -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device=device) as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(f"{file} is broken: {error}") from error


def load_weights(
    folder: Path,
    targets: dict[str, Tensor],
    progress: Progress,
    cuts: Cuts = {},  # noqa: B006
    rename: Rename = same_name,
) -> None:
    """Fill every target from the tensor of its name.

    Derived tensors (rotary frequencies, a head that equals the embedding) are ignored. Raises CheckpointError on files
    that are missing or broken, and on tensors that are missing, unexpected, or of the wrong shape or type.
    """
    # Check all headers before the first tensor, which may be large, is read.
    files = weight_files(folder)
    _check_headers(folder, targets, cuts, files, rename)
    total = sum(file.stat().st_size for file in files)
    done = 0
    device = str(next(iter(targets.values())).device)
    for file in files:
        with opened(file, device) as tensors:
            for name_in_file in tensors.keys():  # noqa: SIM118 - not a mapping
                name = rename(name_in_file)
                if name in targets:
                    read = _fill(targets[name], tensors.get_slice(name_in_file), cuts.get(name))
                    progress(min(done := done + read, total), total)
    progress(total, total)


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
            whole = target if cut is None else target.new_empty(_whole(target, cut))
            whole.normal_(0.0, deviation, generator=generators[device])
            if cut is not None:
                target.copy_(whole[cut.slices])
        progress(done := done + target.nbytes, total)


def _check_headers(folder: Path, targets: dict[str, Tensor], cuts: Cuts, files: list[Path], rename: Rename) -> None:
    names: set[str] = set()
    for file in files:
        with opened(file) as tensors:
            for name_in_file in tensors.keys():  # noqa: SIM118 - not a mapping
                if (name := rename(name_in_file)) is not None:
                    names.add(name)
                if name in targets:
                    _check_tensor(name_in_file, targets[name], tensors.get_slice(name_in_file), cuts.get(name))
    missing = targets.keys() - names
    unexpected = {name for name in names - targets.keys() if name != TIED and not name.endswith("rotary_emb.inv_freq")}
    problems = [
        f"{kind}: {listed(wrong)}" for kind, wrong in (("missing", missing), ("unexpected", unexpected)) if wrong
    ]
    if problems:
        raise CheckpointError(f"the weights in {folder} do not fit the model; {'; '.join(problems)}")


def _whole(target: Tensor, cut: Cut | None) -> list[int]:
    """Shape of the tensor in the checkpoint."""
    shape = list(target.shape)
    if cut is not None:
        shape[cut.dim] = cut.span.total
    return shape


def _check_tensor(name: str, target: Tensor, found: Any, cut: Cut | None) -> None:
    """`found`: a slice object of safetensors, of which only the header is read."""
    shape = list(found.get_shape())
    if shape != _whole(target, cut):
        raise CheckpointError(f"tensor {name} has shape {shape}, the model needs {_whole(target, cut)}")
    # Integer and 8-bit tensors are quantized: without their scales the values are wrong.
    if found.get_dtype() not in FLOATS:
        raise CheckpointError(f"tensor {name} has type {found.get_dtype()}: quantized weights are not supported")


def _fill(target: Tensor, found: Any, cut: Cut | None) -> int:
    """Copy from `found`, a slice object of safetensors. Returns the size of the whole tensor in bytes."""
    tensor = found[:] if cut is None else found[cut.slices]
    target.copy_(tensor)
    return math.prod(found.get_shape()) * int(tensor.itemsize)


def fill_weights(model: Model, checkpoint: Checkpoint, config: RunnerConfig, progress: Progress) -> None:
    """Fill the model's weights, after which it can be called. Raises CheckpointError."""
    if config.weights == "random":
        deviation = float(checkpoint.config.get("initializer_range", 0.02))
        random_weights(model.targets(), config.weights_seed, deviation, progress, model.cuts())
    elif isinstance(model, SelfLoading):
        model.load(checkpoint.path, progress)
    else:
        rename: Rename = same_name if checkpoint.vision is None else decoder_name
        if isinstance(model, CausalLM):
            rename = resolve_tied(model, checkpoint.path, rename)
        load_weights(checkpoint.path, model.targets(), progress, model.cuts(), rename)
    model.freeze()


def resolve_tied(model: CausalLM, folder: Path, rename: Rename) -> Rename:
    """For a model whose config.json ties the head to the embedding, although its files may disagree; decides as
    transformers does. Gives the model a head of its own if the files contain one whose values differ from the
    embedding's. Returns `rename`, extended to map the head to the embedding if the files contain only the head."""
    if not model.config.tie_word_embeddings:
        return rename
    places = _places(folder, rename)
    if TIED not in places:
        return rename
    if EMBEDDING not in places:
        return lambda name: EMBEDDING if rename(name) == TIED else rename(name)
    if not _equal(places[TIED], places[EMBEDDING]):
        model.untie()
    return rename


class Place(NamedTuple):
    file: Path
    name: str


def _places(folder: Path, rename: Rename) -> Mapping[str | None, Place]:
    """Where in the files each tensor of the model is, by target name."""
    places: dict[str | None, Place] = {}
    for file in weight_files(folder):
        with opened(file) as tensors:
            places |= {rename(name): Place(file, name) for name in tensors.keys()}  # noqa: SIM118 - not a mapping
    return places


def _equal(one: Place, other: Place) -> bool:
    with opened(one.file) as first, opened(other.file) as second:
        pair = first.get_slice(one.name), second.get_slice(other.name)
        return pair[0].get_shape() == pair[1].get_shape() and all(
            torch.equal(*(matrix[start : start + ROWS].float() for matrix in pair)) for start in _starts(pair[0])
        )


def _starts(matrix: Any) -> Iterator[int]:
    yield from range(0, matrix.get_shape()[0], ROWS)
