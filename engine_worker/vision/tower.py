"""What computes the rows of images, for each kind of model: transformers' own modules."""

from typing import Any, Protocol

import torch
from torch import Tensor

from sluice.ring.checkpoint import Checkpoint
from sluice.ring.images import Image
from sluice.ring.tables import Table


class Tower(Protocol):
    """First its weights are loaded, then it is called."""

    def targets(self) -> dict[str, Tensor]:
        """By names of `vision_name`."""

    def encode(self, image: Image) -> Table:
        """Raises PictureError."""


def make_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tower:
    """Of a checkpoint with `vision`. Raises CheckpointError."""
    # Imported only if needed: transformers takes seconds to import.
    if checkpoint.vision is not None and checkpoint.vision.scaling is not None:
        from engine_worker.vision.qwen import QwenTower

        return QwenTower(checkpoint.path, checkpoint.vision.scaling, dtype, device)
    from engine_worker.vision.llava import LlavaTower

    return LlavaTower(checkpoint.path, dtype, device)


def table_of(image: Image, rows: Tensor, hidden_size: int) -> Table:
    """`rows` [rows, hidden]. Raises ValueError if they are not as many as the image is to have."""
    if rows.shape != (image.rows, hidden_size):
        raise ValueError(f"an image has {tuple(rows.shape)} rows, expected {image.rows, hidden_size}")
    # The image's digest identifies its rows, too: they follow from the image.
    data: Any = rows.float().cpu().contiguous().numpy()
    return Table(image.digest, image.rows, hidden_size, "float32", memoryview(data).cast("B"))
