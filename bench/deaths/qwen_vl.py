"""Streams with images through a Qwen2.5-VL with random weights, in which the number of rows depends on the size of an
image, and tokens have three positions."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.deaths import images
from bench.deaths.requests import StreamRequest
from bench.deaths.streams import StreamsPlan
from sluice.tiny_model import path

PLACEHOLDER = "<|im_start|><|endoftext|><|im_end|>"
START_ID, PAD_ID, END_ID = 4094, 4093, 4095
HIDDEN_SIZE = 128
PATCH, MERGE = 14, 2
ROW_PIXELS = (PATCH * MERGE) ** 2
CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 3,
        "num_heads": 4,
        "hidden_size": 64,
        "out_hidden_size": HIDDEN_SIZE,
        "intermediate_size": 128,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 2 * PATCH * MERGE,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.3,
    },
    "vocab_size": 4096,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": PAD_ID,
    "vision_start_token_id": START_ID,
    "vision_end_token_id": END_ID,
    "image_token_id": PAD_ID,
    "video_token_id": END_ID,
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 4 * ROW_PIXELS,
    "max_pixels": 40 * ROW_PIXELS,
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
}
WIDE, TALL = images.picture(3, (280, 60)), images.picture(4, (90, 200))
MIXED = f"images of several sizes, {images.WAYS}"


def write_model(folder: Path) -> Path:
    """A checkpoint whose tokens depend on the content of the images."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    torch.manual_seed(1)
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    # In the published format, with the decoder's options next to vision_config; transformers writes another format.
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        # Scale the rows to about the size of token embeddings.
        if "merger.mlp" in name and tensor.dim() == 2:
            torch.nn.init.normal_(tensor, std=0.2)
    save_file(tensors, weights, {"format": "pt"})
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    for name in images.FILES:
        (folder / name).write_bytes((path() / name).read_bytes())
    return folder


def requests(plan: StreamsPlan) -> list[StreamRequest]:
    return images.requests(plan, PLACEHOLDER, images.kinds(WIDE, TALL))
