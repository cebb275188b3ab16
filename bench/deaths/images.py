"""Streams with images, through a ring of their own: the bundled model as the decoder of a LLaVA."""

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from msgspec.structs import replace

from bench.deaths.requests import StreamRequest, in_turns
from bench.deaths.streams import StreamsPlan
from sluice.tiny_model import path

PLACEHOLDER, TOKEN_ID = "<|endoftext|>", 4093
SIZE = 56
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": TOKEN_ID,
    "tie_word_embeddings": True,
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": SIZE,
        "patch_size": 14,
        "projection_dim": 32,
        "initializer_range": 0.3,
    },
}
PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": SIZE},
    "crop_size": {"height": SIZE, "width": SIZE},
}
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def write_model(folder: Path) -> Path:
    """Its tokens are those of the bundled model where there are no images."""
    import torch
    from transformers import AutoModelForCausalLM, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(1)
    raw: dict[str, Any] = {**CONFIG, "text_config": json.loads((path() / "config.json").read_text(encoding="utf-8"))}
    config: Any = LlavaConfig
    model: Any = LlavaForConditionalGeneration(config.from_dict(raw))
    decoder: Any = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32)
    model.model.language_model.load_state_dict(decoder.model.state_dict())
    # Rows about as large as the embeddings of tokens.
    torch.nn.init.normal_(model.model.multi_modal_projector.linear_2.weight, std=0.1)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    for name in FILES:
        (folder / name).write_bytes((path() / name).read_bytes())
    return folder


def picture(seed: int) -> bytes:
    file = BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (60, 80, 3), np.uint8)
    PIL.Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


MIXED = "images, greedy, seeded, with beam search and with guided decoding, and streams without images beside them"


def requests(plan: StreamsPlan) -> list[StreamRequest]:
    found = in_turns(KINDS, plan.streams, plan.max_tokens)
    return [
        each if each.kind == BESIDE else replace(each, prompt=PLACEHOLDER * len(each.options["images"]) + each.prompt)
        for each in found
    ]


BESIDE = "beside images"
ONE, OTHER = picture(1), picture(2)
KINDS: Mapping[str, Mapping[str, Any]] = {
    "image": {"temperature": 0.0, "logprobs": 1, "images": [ONE]},
    "two images": {"temperature": 0.8, "n": 2, "images": [OTHER, ONE]},
    BESIDE: {"temperature": 0.9},
    "images, beams": {"n": 2, "beam_search": {"width": 4}, "images": [ONE, OTHER]},
    "image, guided": {
        "temperature": 0.8,
        "guided": {"regex": r"(\[[a-z]{3}, [0-9]{2}\] ){12,30}end"},
        "images": [OTHER],
    },
}
