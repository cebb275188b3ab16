"""Vision towers, which compute the rows of images: modules of transformers, for each kind of model.

Imports transformers, which takes seconds, so import this module only where it is needed.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, LlamaConfig, LlavaConfig, LlavaModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from engine_worker.vision.names import TOWER, VISUAL
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import Checkpoint
from sluice.checkpoint.vision import Scaling
from sluice.pictures import PictureError, open_picture
from sluice.wire.tables import Image, Table

T = TypeVar("T")

QWEN_TOWERS = {
    "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
    "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
}
"""By model_type."""


class Tower(Protocol):
    """Created without weights, which must be loaded before it is called."""

    def targets(self) -> dict[str, Tensor]:
        """The weights to load, by name as in `vision_name`."""

    def encode(self, image: Image) -> Table:
        """Compute the rows of an image. Raises PictureError."""


def make_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tower:
    """The tower of a checkpoint whose `vision` is set. Raises CheckpointError."""
    if checkpoint.vision is not None and checkpoint.vision.scaling is not None:
        return QwenTower(checkpoint.path, checkpoint.vision.scaling, dtype, device)
    return LlavaTower(checkpoint.path, dtype, device)


class LlavaTower:
    """LLaVA's vision tower and projector, without the decoder (arXiv:2310.03744)."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises CheckpointError."""
        config: Any = _read_by(folder, LlavaConfig.from_pretrained)
        self._processor = _read_processor(folder)
        self._hidden_size = config.text_config.hidden_size
        config.text_config = LlamaConfig(
            hidden_size=self._hidden_size,
            intermediate_size=1,
            num_hidden_layers=0,
            num_attention_heads=1,
            vocab_size=1,
            bos_token_id=None,
            eos_token_id=None,
        )
        module: Any = LlavaModel
        with torch.device(device):
            self._model = module._from_config(config, dtype=dtype).eval()
        self._dtype, self._device = dtype, device

    def targets(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._model.state_dict().items() if name.startswith(TOWER)}

    @torch.inference_mode()
    def encode(self, image: Image) -> Table:
        if image.columns:
            raise PictureError("has a grid of rows, which this model does not support")
        pixels = self._processor(images=open_picture(image.data), return_tensors="pt")["pixel_values"]
        features = self._model.get_image_features(pixel_values=pixels.to(self._device, self._dtype))
        return _table_of(image, features.pooler_output[0], self._hidden_size)


class QwenTower:
    """The vision tower of Qwen2-VL or Qwen2.5-VL, without the decoder (arXiv:2409.12191, 2502.13923)."""

    def __init__(self, folder: Path, scaling: Scaling, dtype: torch.dtype, device: torch.device) -> None:
        """Raises CheckpointError."""
        config: Any = _read_by(folder, AutoConfig.from_pretrained)
        self._processor = _read_processor(folder)
        module: Any = QWEN_TOWERS.get(config.model_type)
        if module is None:
            raise CheckpointError(
                f"{folder}: model_type {config.model_type!r} is not supported; supported: {', '.join(QWEN_TOWERS)}"
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
        return _table_of(image, features.pooler_output, self._hidden_size)


def _read_processor(folder: Path) -> Any:
    """The processor that converts images to the pixels that the model was trained on. Raises CheckpointError."""
    # Not the torchvision backend, whose versions resize differently.
    processors: Any = AutoImageProcessor
    return _read_by(folder, partial(processors.from_pretrained, backend="pil"))


def _read_by(folder: Path, read: Callable[..., T]) -> T:
    """Call a `from_pretrained` of transformers. Raises CheckpointError."""
    try:
        return read(folder, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"transformers cannot read the image processing of {folder}: {error}") from error


def _table_of(image: Image, rows: Tensor, hidden_size: int) -> Table:
    """The rows, [rows, hidden], as a table. Raises ValueError if their shape is not the one that `image` claims."""
    if rows.shape != (image.rows, hidden_size):
        raise ValueError(f"the rows of an image have shape {tuple(rows.shape)}, expected {image.rows, hidden_size}")
    # The digest of the image also identifies its rows, which are a function of the image.
    data: Any = rows.float().cpu().contiguous().numpy()
    return Table(image.digest, image.rows, memoryview(data).cast("B"), hidden_size, "float32")
