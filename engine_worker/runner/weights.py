"""Weights from safetensors files, one tensor at a time."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_worker.models.decoder import TIED
from sluice.ring.checkpoint import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LISTED = 20

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def load_weights(folder: Path, targets: dict[str, Tensor], progress: Progress) -> None:
    """Fill every target from the tensor of its name.

    Raises CheckpointError on files that are missing or broken, and on tensors that are missing, unexpected, or of
    another shape or type. Derived tensors that old checkpoints carry are passed over: rotary frequencies and a tied
    head.
    """
    files = _weight_files(folder)
    _check_names(folder, targets, files)
    total = sum(file.stat().st_size for file in files)
    done = 0
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                if name in targets:
                    tensor = tensors.get_tensor(name)
                    _fill(name, targets[name], tensor)
                    progress(min(done := done + tensor.nbytes, total), total)
    progress(total, total)


def random_weights(targets: dict[str, Tensor], seed: int, deviation: float, progress: Progress) -> None:
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
            target.normal_(0.0, deviation, generator=generators[device])
        progress(done := done + target.nbytes, total)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of weights: {error!r}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks weight files of its index: {_listed(missing)}")
    return [folder / name for name in names]


def _check_names(folder: Path, targets: dict[str, Tensor], files: list[Path]) -> None:
    found: set[str] = set()
    for file in files:
        with _opened(file) as tensors:
            found.update(tensors.keys())
    missing = targets.keys() - found
    unexpected = {name for name in found - targets.keys() if name != TIED and not name.endswith("rotary_emb.inv_freq")}
    problems = [
        f"{kind}: {_listed(names)}" for kind, names in (("missing", missing), ("unexpected", unexpected)) if names
    ]
    if problems:
        raise CheckpointError(f"the weights in {folder} do not fit the model; {'; '.join(problems)}")


def _fill(name: str, target: Tensor, tensor: Tensor) -> None:
    if tensor.shape != target.shape:
        raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, the model needs {list(target.shape)}")
    if not tensor.is_floating_point() or tensor.itemsize < torch.float16.itemsize:
        raise CheckpointError(f"tensor {name} has type {tensor.dtype}: quantized weights are not supported")
    target.copy_(tensor)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(f"{file} is broken: {error}") from error


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return ", ".join(ordered[:LISTED]) + more
