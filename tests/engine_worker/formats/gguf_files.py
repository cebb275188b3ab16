"""Small GGUF files, written by the format's own library, and what their matrices mean according to it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from sluice.checkpoint.gguf import read_gguf
from sluice.checkpoint.weight_files import GGUF, SINGLE
from sluice.gguf.config import config_of
from tests.engine_worker.models.checkpoints import SIZES, write_checkpoint
from tests.fakes.gguf_file import finish

KINDS = gguf.GGMLQuantizationType
PLAIN = (KINDS.F32, KINDS.F16, KINDS.BF16)
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
"""Bytes at which blocks have a float16."""
EXPERTS = 4
# Rows of whole blocks of 256, also in each of two ranks.
ROUND = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, tuple[PretrainedConfig, gguf.MODEL_ARCH]] = {
    "llama": (LlamaConfig(**ROUND, head_dim=64), gguf.MODEL_ARCH.LLAMA),
    "tied": (LlamaConfig(**ROUND, head_dim=64, tie_word_embeddings=True), gguf.MODEL_ARCH.LLAMA),
    "qwen2": (Qwen2Config(**ROUND), gguf.MODEL_ARCH.QWEN2),
    "qwen3": (Qwen3Config(**ROUND, head_dim=128), gguf.MODEL_ARCH.QWEN3),
    "qwen3moe": (
        Qwen3MoeConfig(
            **ROUND,
            head_dim=64,
            moe_intermediate_size=256,
            num_experts=EXPERTS,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        ),
        gguf.MODEL_ARCH.QWEN3MOE,
    ),
}


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Every code, and scales of the size of a real model's."""
    width, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, columns // width, size), np.uint8)
    for start in HALVES[kind]:
        scales = generator.normal(0, 1e-4 if width == 256 else 1e-2, (rows, columns // width, 1)).astype(np.float16)
        blocks[..., start : start + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def write_pair(folder: Path, model: str, types: Mapping[str, str], default: str = "F32") -> tuple[Path, Path]:
    """The GGUF checkpoint, and a dense one with the values that the format's library reads. types: by the end of the
    name of a matrix."""
    config, architecture = MODELS[model]
    quantized, dense = folder / "gguf", folder / "dense"
    write_checkpoint(dense, config)
    tensors = load_file(dense / SINGLE)
    quantized.mkdir()
    writer = gguf.GGUFWriter(quantized / GGUF, gguf.MODEL_ARCH_NAMES[architecture])
    _write_shape(writer, json.loads((dense / "config.json").read_text()))
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    experts: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors):
        kind = next((types[end] for end in types if name.removesuffix(".weight").endswith(end)), default)
        kind = "F32" if tensors[name].dim() == 1 else kind
        raw, values = _packed(tensors[name].float(), kind, seed=len(name))
        tensors[name] = torch.from_numpy(values)
        if architecture == gguf.MODEL_ARCH.LLAMA:
            raw = _permuted(raw, name, config)
        if ".experts." in name:
            before, after = name.split(".experts.")
            joined = f"{before}.experts.{after.split('.', 1)[1]}"
            experts.setdefault(joined, []).append(raw)
            if len(experts[joined]) < EXPERTS:
                continue
            name, raw = joined, np.stack(experts[joined])
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(ours, raw, raw_dtype=KINDS[kind])
    finish(writer)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, dense / SINGLE)
    for file in dense.glob("*.json"):
        (quantized / file.name).write_bytes(file.read_bytes())
    made = config_of(quantized / GGUF, read_gguf(quantized / GGUF))
    (quantized / "config.json").write_text(json.dumps(made))
    return quantized, dense


def _packed(weight: torch.Tensor, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """As in the file, and the values in float32."""
    if KINDS[kind] in PLAIN:
        raw = gguf.quantize(weight.numpy(), KINDS[kind])
    else:
        raw = random_blocks(kind, *weight.shape, seed)
    return raw, gguf.dequantize(raw, KINDS[kind])


def _permuted(raw: np.ndarray, name: str, config: Any) -> np.ndarray:
    """As llama.cpp's converter does for Llama."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if part not in heads:
        return raw
    return raw.reshape(heads[part], 2, -1, *raw.shape[1:]).swapaxes(1, 2).reshape(raw.shape)


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
