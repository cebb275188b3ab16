"""Loads what computes the rows of images."""

from functools import partial
from io import BytesIO

import torch

from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.weights import load_weights, random_weights
from engine_worker.vision.names import vision_name
from engine_worker.vision.rows import ImageRows
from sluice.ring.checkpoint import Checkpoint, CheckpointError
from sluice.ring.images import Image


def load_images(
    checkpoint: Checkpoint, config: RunnerConfig, dtype: torch.dtype, device: torch.device
) -> ImageRows | None:
    """None: the model takes no images. Called before the KV cache is sized. Raises CheckpointError."""
    if checkpoint.vision is None:
        return None
    # Imported only if needed: transformers takes seconds to import.
    from engine_worker.vision.tower import Tower

    tower = Tower(checkpoint.path, dtype, device)
    targets = tower.targets()
    if config.weights == "random":
        random_weights(targets, config.weights_seed, 0.02, _ignore)
    else:
        load_weights(checkpoint.path, targets, _ignore, rename=vision_name)
    rows = checkpoint.vision.rows
    try:
        # Also for the memory that it takes, which the KV cache must not get.
        tower.encode(Image.of(rows, _blank()))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    return ImageRows(tower.encode, rows, config.image_cache_size, partial(_use, device))


def _ignore(*_: object) -> None:
    """Progress: the decoder's weights are many times as large."""


def _use(device: torch.device) -> None:
    # CUDA's current device is a property of the thread.
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _blank() -> bytes:
    import PIL.Image

    file = BytesIO()
    PIL.Image.new("RGB", (64, 64)).save(file, "PNG")
    return file.getvalue()
