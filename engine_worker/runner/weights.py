"""Loads weights from safetensors files: one at a time, only this rank's slice, directly to its device.

A quantized matrix is decoded on the host, and is then as dense as any other.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine_worker.formats.source import FLOATS, Files, Place, Rename, Weight, find_weights, opened, same_name
from engine_worker.layers.shard import Cut
from engine_worker.models.decoder import EMBEDDING, TIED, CausalLM
from engine_worker.models.model import Model, SelfLoading
from engine_worker.runner.config import RunnerConfig
from engine_worker.vision.names import decoder_name
from sluice.checkpoint.folder import Checkpoint, CheckpointError, listed
from sluice.checkpoint.quantization import Quantization

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""
ROWS = 4096
"""Rows of a matrix that are compared at once."""
Cuts = Mapping[str, Cut]
"""By name of a target: which slice of the checkpoint's tensor it holds. Targets not listed hold the whole tensor."""


def ignore_progress(_done: int, _total: int) -> None:
    """A `Progress` that drops the reports."""


def load_weights(
    folder: Path,
    targets: dict[str, Tensor],
    progress: Progress,
    cuts: Cuts = {},  # noqa: B006
    rename: Rename = same_name,
    quantization: Quantization | None = None,
) -> None:
    """Fill every target from the weight of its name.

    Derived tensors (rotary frequencies, a head that equals the embedding) are ignored. Raises CheckpointError on files
    that are missing or broken, and on weights that are missing, unexpected, or of the wrong shape or type.
    """
    # Check all headers before the first tensor, which may be large, is read.
    weights = find_weights(folder, rename)
    _check_names(folder, targets, weights)
    for name, target in targets.items():
        _check_header(weights[name], _whole(target, cuts.get(name)))
    total = sum(file.stat().st_size for file in {place.file for weight in weights.values() for place in weight.places})
    done = 0
    device = str(next(iter(targets.values())).device)
    with Files(device) as files:
        for name, weight in weights.items():
            if name in targets:
                done += _fill(targets[name], name, weight, files, cuts.get(name), quantization)
                progress(min(done, total), total)
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


def _check_names(folder: Path, targets: dict[str, Tensor], weights: Mapping[str, Weight]) -> None:
    missing, unexpected = targets.keys() - weights.keys(), weights.keys() - targets.keys() - {TIED}
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


def _check_header(weight: Weight, shape: list[int]) -> None:
    """The parts of a quantized matrix are checked when they are read."""
    if weight.whole is None:
        return
    _, name, kind, found, _ = weight.whole
    if list(found) != shape:
        raise CheckpointError(f"tensor {name} has shape {list(found)}, the model needs {shape}")
    if kind not in FLOATS:
        raise CheckpointError(f"tensor {name} has type {kind}: only matrices may be quantized")


def _fill(
    target: Tensor, name: str, weight: Weight, files: Files, cut: Cut | None, quantization: Quantization | None
) -> int:
    """Returns the size of the whole weight in the files, in bytes."""
    slices = () if cut is None else cut.slices
    if weight.whole is not None:
        target.copy_(files.plain(weight.whole, slices))
    else:
        target.copy_(files.stored(name, weight, tuple(_whole(target, cut)), quantization).decode()[slices])
    return sum(place.num_bytes for place in weight.places)


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
        load_weights(checkpoint.path, model.targets(), progress, model.cuts(), rename, checkpoint.quantization)
    model.freeze()


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
    with opened(one.file) as first, opened(other.file) as second:
        pair = first.get_slice(one.name), second.get_slice(other.name)
        return all(
            torch.equal(*(matrix[start : start + ROWS].float() for matrix in pair)) for start in _starts(one.shape[0])
        )


def _starts(rows: int) -> Iterator[int]:
    yield from range(0, rows, ROWS)
