"""Small Qwen2-VL and Qwen2.5-VL models with random weights and the tiny model's tokenizer."""

import json
from pathlib import Path

from sluice.checkpoint.vision import Scaling
from tests.fakes.llava import write_tokenizer

START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
IMAGE = START + PAD + END
HIDDEN_SIZE = 64
PATCH, MERGE = 4, 2
SCALING = Scaling(PATCH * MERGE, 4 * 64, 30 * 64)
"""Images have 4 to 30 rows."""
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '" + IMAGE + "' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""A chat template like that of Qwen2-VL, which keeps the order of text and images."""
TOWERS = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": HIDDEN_SIZE, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "out_hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        # In pixels: two by two rows.
        "window_size": 2 * PATCH * MERGE,
        "fullatt_block_indexes": [1],
    },
}
ARCHITECTURES = {"qwen2_vl": "Qwen2VLForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration"}


def write_files(folder: Path, kind: str = "qwen2_vl", *, tied: bool = False) -> Path:
    """All files except the weights. As in published checkpoints, the decoder's options are not in `text_config`."""
    tokenizer = write_tokenizer(folder, [START, PAD, END])
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": SCALING.least_pixels,
        "max_pixels": SCALING.most_pixels,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    vision = {
        "model_type": kind,
        "depth": 2,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "initializer_range": 0.3,
    }
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vision_config": vision | TOWERS[kind],
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "vision_start_token_id": tokenizer.token_to_id(START),
        "vision_end_token_id": tokenizer.token_to_id(END),
        "image_token_id": tokenizer.token_to_id(PAD),
        "video_token_id": tokenizer.get_vocab_size() - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_qwen_vl(folder: Path, kind: str = "qwen2_vl", *, tied: bool = False) -> Path:
    """A model whose outputs depend visibly on the images and their positions."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    write_files(folder, kind, tied=tied)
    config = (folder / "config.json").read_bytes()
    torch.manual_seed(11)
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    (folder / "config.json").write_bytes(config)
    # Scales the image rows to the magnitude of the token embeddings.
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "merger.mlp" in name and tensor.dim() == 2:
            torch.nn.init.normal_(tensor, std=0.2)
    save_file(tensors, file, {"format": "pt"})
    return folder
