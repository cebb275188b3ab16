"""Small random checkpoints, written by transformers."""

from copy import deepcopy
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from sluice.checkpoint.folder import Checkpoint, open_checkpoint

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3, tied": Qwen3Config(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True
    ),
    "qwen3, biased": Qwen3Config(
        **SIZES, num_attention_heads=3, num_key_value_heads=1, head_dim=32, attention_bias=True
    ),
    "llama": LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4),
    "llama, llama3 rope": LlamaConfig(
        **SIZES, num_attention_heads=6, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True
    ),
    "llama, biased, linear rope": LlamaConfig(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=20,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    ),
    "mistral": MistralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=40),
    "mistral, no window": MistralConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=None
    ),
    "qwen2": Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2, half windowed": Qwen2Config(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=1,
        use_sliding_window=True,
        sliding_window=33,
        max_window_layers=1,
    ),
    "qwen3, windowed": Qwen3Config(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=16,
        layer_types=["sliding_attention"] * 2,
    ),
    "qwen3 moe": Qwen3MoeConfig(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
    "qwen3 moe, half sparse, windowed": Qwen3MoeConfig(
        **SIZES | {"num_hidden_layers": 4},
        num_attention_heads=4,
        num_key_value_heads=1,
        moe_intermediate_size=16,
        num_experts=5,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=33,
        tie_word_embeddings=True,
    ),
}


def write_checkpoint(folder: Path, config: PreTrainedConfig, *, shard_size: str = "1GB") -> torch.nn.Module:
    """Write a checkpoint with random weights, including norms and biases; returns the model."""
    torch.manual_seed(1)
    # A copy: the model changes its config (`to` sets the dtype there), and all tests of a process share CONFIGS.
    model = AutoModelForCausalLM.from_config(deepcopy(config)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.copy_(torch.randn_like(weight) * 0.3 + (0.0 if name.endswith("bias") else 1.0))
    model.save_pretrained(folder, max_shard_size=shard_size)
    (folder / "tokenizer.json").write_text("{}")
    return model


def open_written(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder))
