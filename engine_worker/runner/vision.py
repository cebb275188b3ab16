"""Loads the vision tower, which computes the rows of images."""

from functools import partial
from io import BytesIO
from math import isqrt

import torch

from engine_worker.runner.config import RunnerConfig, use_device
from engine_worker.runner.weights import CheckpointWeights, ignore_progress, random_weights
from engine_worker.vision.names import vision_name
from engine_worker.vision.rows import ImageRows
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import Checkpoint
from sluice.checkpoint.vision import Vision
from sluice.wire.tables import Image

BLANK_PIXELS = 64
"""Side of the test image, unless a model's largest image is used."""


def load_images(
    checkpoint: Checkpoint, config: RunnerConfig, dtype: torch.dtype, device: torch.device
) -> ImageRows | None:
    """Load the tower and compute a test image, before the KV cache is sized. None if the model accepts no images.
    Raises CheckpointError."""
    if checkpoint.vision is None:
        return None
    # Imported only if needed: transformers takes seconds to import.
    from engine_worker.vision.towers import make_tower

    tower = make_tower(checkpoint, dtype, device)
    targets = tower.targets()
    # No progress is reported: the decoder's weights, which are many times as large, take most of the time.
    if config.weights == "random":
        random_weights(targets, config.weights_seed, 0.02, ignore_progress)
    else:
        quantization = checkpoint.quantization
        with CheckpointWeights(
            checkpoint.path, targets, ignore_progress, rename=vision_name, quantization=quantization
        ) as weights:
            weights.fill()
    try:
        # This also allocates the tower's memory, so that the KV cache leaves it. Large images are slow on a CPU.
        tower.encode(_blank(checkpoint.vision, largest=device.type == "cuda"))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    return ImageRows(tower.encode, checkpoint.vision.rows, config.image_cache_size, partial(use_device, device))


def _blank(vision: Vision, *, largest: bool) -> Image:
    """A black image, of the largest size if the model has one and `largest` is set."""
    import PIL.Image

    side = isqrt(vision.scaling.most_pixels) if largest and vision.scaling is not None else BLANK_PIXELS
    file = BytesIO()
    PIL.Image.new("RGB", (side, side)).save(file, "PNG")
    grid = vision.grid(side, side)
    if grid is None:
        return Image.of(vision.rows, file.getvalue())
    return Image.of(grid.rows, file.getvalue(), grid.columns)
