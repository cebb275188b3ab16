"""Small checkpoints whose matrices are quantized, and dense ones of the same values."""

import json
from collections.abc import Collection
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

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


def write_pair(
    folder: Path, model: str, format_name: str, excluded: Collection[str] = ("0.self_attn.v_proj",)
) -> tuple[Path, Path]:
    """The quantized checkpoint, and the dense one. Projections whose names end with one of `excluded` stay plain, and
    so do embedding, head and router."""
    packer, config = FORMATS[format_name]
    quantized, dense = folder / "quantized", folder / "dense"
    for each in (quantized, dense):
        write_checkpoint(each, MODELS[model])
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
