"""Small checkpoints whose matrices are quantized, and dense ones of the same values."""

import json
import shutil
from collections.abc import Collection
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    LlamaConfig,
    OlmoConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from tests.engine_worker.formats.packed import FORMATS
from tests.engine_worker.models.checkpoints import SIZES, write_checkpoint

FILE = "model.safetensors"
# Whole groups of 16, also in each of two ranks, and whole words of 3 bits.
ROUND = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama": LlamaConfig(**ROUND),
    "qwen3, biased": Qwen3Config(**ROUND, head_dim=32, attention_bias=True),
    "qwen2, tied": Qwen2Config(**ROUND, tie_word_embeddings=True),
    "qwen3 moe": Qwen3MoeConfig(
        **ROUND, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
    ),
}
ADAPTED = {
    "olmo": OlmoConfig(**ROUND),
    "starcoder2": Starcoder2Config(**ROUND, sliding_window=16),
    "gpt2": GPT2Config(vocab_size=97, n_positions=512, n_embd=64, n_layer=2, n_head=2),
    "qwen2 moe": Qwen2MoeConfig(**ROUND, moe_intermediate_size=32, num_experts=4, shared_expert_intermediate_size=32),
}
"""Served through transformers' modules."""


def write_pair(
    folder: Path, model: str, format_name: str, excluded: Collection[str] = ("0.self_attn.v_proj",)
) -> tuple[Path, Path]:
    """The quantized checkpoint, and the dense one. Projections whose names end with one of `excluded` stay plain, and
    so do embedding, head and router."""
    write_checkpoint(folder / "plain", (MODELS | ADAPTED)[model])
    return pair_of(folder / "plain", folder, format_name, excluded)


def pair_of(source: Path, folder: Path, format_name: str, excluded: Collection[str] = ()) -> tuple[Path, Path]:
    """As `write_pair`, from a checkpoint with one file of weights."""
    packer, config = FORMATS[format_name]
    quantized, dense = folder / "quantized", folder / "dense"
    for each in (quantized, dense):
        shutil.copytree(source, each, dirs_exist_ok=True, copy_function=shutil.copyfile)
    tensors = load_file(quantized / FILE)
    names = [name for name in tensors if name.endswith("proj.weight")]
    chosen = [name for name in names if not name.removesuffix(".weight").endswith(tuple(excluded))]
    values = dict(tensors)
    for name in chosen:
        packed = packer(tensors.pop(name).float())
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": each.contiguous() for part, each in packed.parts.items()}
        values[name] = packed.dense.contiguous()
    save_file(tensors, quantized / FILE)
    save_file(values, dense / FILE)
    change_config(quantized, {"quantization_config": config})
    return quantized, dense


def change_config(folder: Path, changes: dict[str, object]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
