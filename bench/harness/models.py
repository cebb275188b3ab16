"""Models to serve (the bundled checkpoint, and random weights in several shapes of Qwen3), and prompts for them."""

import argparse
import inspect
import json
import re
import shutil
import subprocess
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import sluice

TINY = Path(sluice.__file__).parent / "tiny_model" / "checkpoint"

SOURCES = (argparse, inspect, subprocess, typing)
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "eos_token_id": 4093,
}


QWEN3_25M: dict[str, Any] = {
    **QWEN3_06B,
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "vocab_size": 65536,
}
QWEN3_5M: dict[str, Any] = {
    **QWEN3_25M,
    "intermediate_size": 640,
    "max_position_embeddings": 40960,
    "num_hidden_layers": 6,
    "vocab_size": 4096,
}
"""The tiny model's shape, with a context length for long prompts."""


WEAKENED = ("o_proj.weight", "down_proj.weight")
"""The weights whose products a layer adds to the hidden states."""


def write_deepened_tiny(folder: Path, copies: int, strength: float) -> Path:
    """The tiny model followed by `copies` copies of its layers, whose contribution is scaled by `strength`. The model
    costs more than the tiny one and mostly predicts the same tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    layers, tensors = config["num_hidden_layers"], load_file(TINY / "model.safetensors")
    for name, tensor in list(tensors.items()):
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if found is None:
            continue
        for copy in range(1, copies + 1):
            weight = tensor * strength if found[2].endswith(WEAKENED) else tensor.clone()
            tensors[f"model.layers.{int(found[1]) + layers * copy}.{found[2]}"] = weight
    config |= {"num_hidden_layers": layers * (copies + 1), "layer_types": config["layer_types"] * (copies + 1)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_qwen3_06b(folder: Path) -> Path:
    return write_shape(folder, QWEN3_06B)


def write_shape(folder: Path, shape: Mapping[str, Any]) -> Path:
    """A model folder without weights, for `weights="random"`. Its tokenizer has a text for every id."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    shutil.copy(TINY / "tokenizer_config.json", folder)
    tokenizer = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    known = set(tokenizer["model"]["vocab"].values()) | {token["id"] for token in tokenizer["added_tokens"]}
    tokenizer["model"]["vocab"] |= {f"w{i}": i for i in range(shape["vocab_size"]) if i not in known}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def python_prompts(model: Path, count: int, tokens: int) -> list[list[int]]:
    """`count` prompts of `tokens` token ids each: excerpts of Python's standard library that differ from the first
    block on. The tiny model was trained on Python, so its continuations resemble real code."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = [i for module in SOURCES for i in tokenizer.encode(inspect.getsource(module)).ids]
    stride = max(1, (len(ids) - tokens) // count)
    return [ids[at : at + tokens] for at in range(0, count * stride, stride)]
