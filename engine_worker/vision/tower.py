"""LLaVA's vision tower and projector: transformers' own modules, without the decoder (arXiv:2310.03744)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoImageProcessor, LlamaConfig, LlavaConfig, LlavaModel

from engine_worker.vision.names import TOWER
from sluice.ring.checkpoint import CheckpointError
from sluice.ring.images import Image
from sluice.ring.pictures import open_picture
from sluice.ring.tables import Table


class Tower:
    """First its weights are loaded, then it is called. Raises CheckpointError."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        try:
            config: Any = LlavaConfig.from_pretrained(folder, local_files_only=True)
            # What reads the pixels as the checkpoint was trained on; torchvision's versions differ in their resizing.
            processors: Any = AutoImageProcessor
            self._processor = processors.from_pretrained(folder, backend="pil", local_files_only=True)
        except Exception as error:
            raise CheckpointError(f"transformers cannot read how {folder} takes images: {error}") from error
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
        """By names of `vision_name`."""
        return {name: value for name, value in self._model.state_dict().items() if name.startswith(TOWER)}

    @torch.inference_mode()
    def encode(self, image: Image) -> Table:
        """Raises PictureError."""
        pixels = self._processor(images=open_picture(image.data), return_tensors="pt")["pixel_values"]
        features = self._model.get_image_features(pixel_values=pixels.to(self._device, self._dtype))
        rows = features.pooler_output[0].float().cpu().contiguous()
        if rows.shape != (image.rows, self._hidden_size):
            raise ValueError(f"an image has {tuple(rows.shape)} rows, expected {image.rows, self._hidden_size}")
        # Its digest tells it from others: what is made of an image follows from the image.
        return Table(image.digest, image.rows, self._hidden_size, "float32", memoryview(rows.numpy()).cast("B"))
