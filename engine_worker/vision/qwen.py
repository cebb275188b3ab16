"""The vision towers of Qwen2-VL and Qwen2.5-VL, without the decoder (arXiv:2409.12191, 2502.13923)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from engine_worker.vision.names import VISUAL
from engine_worker.vision.processor import read_by, read_processor
from engine_worker.vision.rows import table_of
from sluice.checkpoint.folder import CheckpointError
from sluice.checkpoint.vision import Scaling
from sluice.pictures import PictureError, open_picture
from sluice.wire.tables import Image, Table

TOWERS = {
    "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
    "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
}
"""By model_type."""


class QwenTower:
    """See `Tower`."""

    def __init__(self, folder: Path, scaling: Scaling, dtype: torch.dtype, device: torch.device) -> None:
        """Raises CheckpointError."""
        config: Any = read_by(folder, AutoConfig.from_pretrained)
        self._processor = read_processor(folder)
        module: Any = TOWERS.get(config.model_type)
        if module is None:
            raise CheckpointError(
                f"{folder}: model_type {config.model_type!r} is not supported; supported: {', '.join(TOWERS)}"
            )
        self._hidden_size = config.text_config.hidden_size
        self._merge = config.vision_config.spatial_merge_size
        # The checkpoint's limits, lowered to the largest image that is computed.
        self._limits = {"shortest_edge": scaling.least_pixels, "longest_edge": scaling.most_pixels}
        with torch.device(device):
            self._model = module._from_config(config.vision_config, dtype=dtype).eval()
        self._dtype, self._device = dtype, device

    def targets(self) -> dict[str, Tensor]:
        return {VISUAL + name: value for name, value in self._model.state_dict().items()}

    @torch.inference_mode()
    def encode(self, image: Image) -> Table:
        inputs = self._processor(images=open_picture(image.data), size=self._limits, return_tensors="pt")
        grid = inputs["image_grid_thw"]
        _, lines, columns = (grid[0] // self._merge).tolist()
        if (image.rows, image.columns) != (lines * columns, columns):
            claimed = f"{image.rows} rows in lines of {image.columns}"
            raise PictureError(f"has {lines} x {columns} rows by its size, not {claimed}")
        pixels = inputs["pixel_values"].to(self._device, self._dtype)
        features = self._model(pixels, grid_thw=grid.to(self._device))
        return table_of(image, features.pooler_output, self._hidden_size)
