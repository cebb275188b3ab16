"""Vision towers, which compute the rows of images: modules of transformers, for each kind of model."""

from typing import Protocol

import torch
from torch import Tensor

from sluice.checkpoint.folder import Checkpoint
from sluice.wire.tables import Image, Table


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
