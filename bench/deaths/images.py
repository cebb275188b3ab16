"""Streams with images, through a separate ring: a LLaVA with the bundled model as its decoder."""

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
    """A checkpoint that generates the same tokens as the bundled model for prompts without images."""
    import torch
    from transformers import AutoModelForCausalLM, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(1)
    raw: dict[str, Any] = {**CONFIG, "text_config": json.loads((path() / "config.json").read_text(encoding="utf-8"))}
    config: Any = LlavaConfig
    model: Any = LlavaForConditionalGeneration(config.from_dict(raw))
    decoder: Any = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32)
    model.model.language_model.load_state_dict(decoder.model.state_dict())
    # Scale the rows to about the size of token embeddings.
    torch.nn.init.normal_(model.model.multi_modal_projector.linear_2.weight, std=0.1)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    for name in FILES:
        (folder / name).write_bytes((path() / name).read_bytes())
    return folder


def picture(seed: int, size: tuple[int, int] = (80, 60)) -> bytes:
    """`size`: width and height."""
    file = BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    PIL.Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


WAYS = "greedy, seeded, with beam search and with guided decoding, and streams without images"
MIXED = f"images, {WAYS}"
WITHOUT = "without images"


def kinds(one: bytes, other: bytes) -> Mapping[str, Mapping[str, Any]]:
    return {
        "image": {"temperature": 0.0, "logprobs": 1, "images": [one]},
        "two images": {"temperature": 0.8, "n": 2, "images": [other, one]},
        WITHOUT: {"temperature": 0.9},
        "images, beams": {"n": 2, "beam_search": {"width": 4}, "images": [one, other]},
        "image, guided": {
            "temperature": 0.8,
            "guided": {"regex": r"(\[[a-z]{3}, [0-9]{2}\] ){12,30}end"},
            "images": [other],
        },
    }


KINDS = kinds(picture(1), picture(2))


def requests(
    plan: StreamsPlan, placeholder: str = PLACEHOLDER, kinds: Mapping[str, Mapping[str, Any]] = KINDS
) -> list[StreamRequest]:
    """`placeholder` stands for an image in the text of a prompt."""
    found = in_turns(kinds, plan.streams, plan.max_tokens)
    return [
        each
        if each.kind == WITHOUT
        else replace(each, prompt=f"{placeholder * len(each.options['images'])}{each.prompt}")
        for each in found
    ]
