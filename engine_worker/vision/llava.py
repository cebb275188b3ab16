"""LLaVA's vision tower and projector, without the decoder (arXiv:2310.03744)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlavaConfig, LlavaModel

from engine_worker.vision.names import TOWER
from engine_worker.vision.processor import read_by, read_processor
from engine_worker.vision.rows import table_of
from sluice.pictures import PictureError, open_picture
from sluice.wire.tables import Image, Table


class LlavaTower:
    """See `Tower`."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises CheckpointError."""
        config: Any = read_by(folder, LlavaConfig.from_pretrained)
        self._processor = read_processor(folder)
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
        return table_of(image, features.pooler_output[0], self._hidden_size)
