"""A small LLaVA model with random weights and the tiny model's tokenizer, and pictures for it."""

import json
import random
from io import BytesIO
from pathlib import Path

import PIL.Image
from tokenizers import Tokenizer

from sluice import tiny_model

IMAGE = "<image>"
SIZE, PATCH = 32, 8
ROWS = (SIZE // PATCH) ** 2
HIDDEN_SIZE = 64
TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""The chat template of LLaVA 1.5, with the same spaces."""
SQUARE = {"height": SIZE, "width": SIZE}
PROCESSORS = {
    "clip": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": SIZE},
        "crop_size": SQUARE,
    },
    "siglip": {"image_processor_type": "SiglipImageProcessor", "size": SQUARE},
}


def write_tokenizer(folder: Path, special: list[str]) -> Tokenizer:
    """The tiny model's tokenizer with additional special tokens."""
    tokenizer = Tokenizer.from_file(str(tiny_model.path() / "tokenizer.json"))
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes((tiny_model.path() / "tokenizer_config.json").read_bytes())
    return tokenizer


def write_files(folder: Path, *, tower: str = "clip", decoder: str = "llama", strategy: str = "default") -> Path:
    """All files except the weights, which is what a router reads."""
    tokenizer = write_tokenizer(folder, [IMAGE])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[tower]))
    vision = {
        "model_type": f"{tower}_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": SIZE,
        "patch_size": PATCH,
        "projection_dim": 32,
        "initializer_range": 0.3,
    }
    text = {
        "model_type": decoder,
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": vision,
        "text_config": text,
        "image_token_index": tokenizer.token_to_id(IMAGE),
        "image_seq_length": ROWS + (strategy == "full"),
        "vision_feature_select_strategy": strategy,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_llava(folder: Path, **kinds: str) -> Path:
    """A model whose outputs depend visibly on the images. `kinds`: as in `write_files`."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    write_files(folder, **kinds)
    torch.manual_seed(11)
    model = LlavaForConditionalGeneration(LlavaConfig.from_pretrained(folder))
    # Scales the image rows to the magnitude of the token embeddings.
    torch.nn.init.normal_(model.model.multi_modal_projector.linear_1.weight, std=0.3)
    torch.nn.init.normal_(model.model.multi_modal_projector.linear_2.weight, std=0.1)
    model.save_pretrained(folder)
    return folder


def picture(seed: int, size: tuple[int, int] = (40, 36), form: str = "PNG") -> bytes:
    """An encoded image of noise that differs for each seed."""
    width, height = size
    file = BytesIO()
    pixels = random.Random(seed).randbytes(3 * width * height)
    PIL.Image.frombytes("RGB", size, pixels).save(file, form)
    return file.getvalue()
