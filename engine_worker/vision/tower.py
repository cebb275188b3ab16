"""Vision towers, which compute the rows of images: modules of transformers, for each kind of model."""

from typing import Any, Protocol

import torch
from torch import Tensor

from sluice.checkpoint.folder import Checkpoint
from sluice.wire.images import Image
from sluice.wire.tables import Table


class Tower(Protocol):
    """Created without weights, which must be loaded before it is called."""

    def targets(self) -> dict[str, Tensor]:
        """The weights to load, by name as in `vision_name`."""

    def encode(self, image: Image) -> Table:
        """Compute the rows of an image. Raises PictureError."""


def make_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tower:
    """The tower of a checkpoint whose `vision` is set. Raises CheckpointError."""
    # Imported only if needed: transformers takes seconds to import.
    if checkpoint.vision is not None and checkpoint.vision.scaling is not None:
        from engine_worker.vision.qwen import QwenTower

        return QwenTower(checkpoint.path, checkpoint.vision.scaling, dtype, device)
    from engine_worker.vision.llava import LlavaTower

    return LlavaTower(checkpoint.path, dtype, device)


def table_of(image: Image, rows: Tensor, hidden_size: int) -> Table:
    """`rows` [rows, hidden]. Raises ValueError if their shape is not the one that the image should have."""
    if rows.shape != (image.rows, hidden_size):
        raise ValueError(f"the rows of an image have shape {tuple(rows.shape)}, expected {image.rows, hidden_size}")
    # The digest of the image also identifies its rows, which are a function of the image.
    data: Any = rows.float().cpu().contiguous().numpy()
    return Table(image.digest, image.rows, hidden_size, "float32", memoryview(data).cast("B"))
