"""Models to serve (the bundled checkpoint, and random weights in several shapes of Qwen3), and prompts for them."""

import argparse
import inspect
import json
import re
import shutil
import subprocess
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import sluice
from engine_worker.formats.rounding import rounding_of
from sluice.checkpoint.weight_files import SINGLE

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


def write_shuffled(source: Path, folder: Path) -> Path:
    """The same function with the units of its hidden states, MLPs and values in another order, in float32. Weights
    that were rounded in groups, as those of a GGUF file, are then rounded again in other groups, like weights that
    never were."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    random = torch.Generator().manual_seed(0)
    hidden = torch.randperm(config["hidden_size"], generator=random)
    inner = torch.randperm(config["intermediate_size"], generator=random)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    head = torch.randperm(head_dim, generator=random)

    def shuffled(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            return weight[inner][:, hidden]
        if name.endswith("down_proj.weight"):
            return weight[hidden][:, inner]
        if name.endswith("v_proj.weight"):
            return weight.view(-1, head_dim, weight.shape[1])[:, head][..., hidden].flatten(0, 1)
        if name.endswith("o_proj.weight"):
            return weight[hidden].view(len(hidden), -1, head_dim)[..., head].flatten(1)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return weight
        return weight[..., hidden]

    return _write_changed(source, folder, shuffled)


def write_rounded(source: Path, folder: Path, quantize: str) -> Path:
    """The values, in float32, for which the weights stand that an engine with this setting has."""

    def rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
        rounding = rounding_of(quantize, name)
        return weight if rounding is None else rounding(weight).decode()

    return _write_changed(source, folder, rounded)


def _write_changed(source: Path, folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """`change`: maps the name and values of a weight to its new values."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {name: change(name, weight.float()) for name, weight in load_file(source / SINGLE).items()}
    save_file({name: weight.contiguous() for name, weight in tensors.items()}, folder / SINGLE, {"format": "pt"})
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
