"""Conversion of a LoRA adapter: from TensorRT-LLM's tensors to the two files that peft saves."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sluice.trtllm.errors import OptionError, UnsupportedOptionError
from sluice.trtllm.model_inputs import LoraConfig

if TYPE_CHECKING:
    import torch

MODULES = (
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate", "cross_attn_qkv",
    "cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_dense", "moe_h_to_4h", "moe_4h_to_h", "moe_gate",
    "moe_router", "mlp_router", "mlp_gate_up", "shared_expert_h_to_4h", "shared_expert_4h_to_h", "shared_expert_gate",
)  # fmt: skip
"""Module names by TensorRT-LLM's module id (cpp/include/tensorrt_llm/runtime/loraModule.h)."""
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_dense": "self_attn.o_proj",
    "mlp_h_to_4h": "mlp.gate_proj",
    "mlp_4h_to_h": "mlp.down_proj",
    "mlp_gate": "mlp.up_proj",
}
"""Names of modules within a layer of a checkpoint, as in TensorRT-LLM's hf_lora_convert.py."""
PREFIX = "base_model.model.model.layers"
FUSED = ("attn_qkv", "mlp_gate_up")
DTYPES = ("float32", "float16", "bfloat16")


class PeftFiles(NamedTuple):
    config_json: bytes
    safetensors: bytes


class Part(NamedTuple):
    """The low-rank update BAx that an adapter adds to one linear layer."""

    path: str
    """Layer number and name, such as "3.self_attn.q_proj"."""
    a: "torch.Tensor"
    """[r, inputs]"""
    b: "torch.Tensor"
    """[outputs, r], multiplied by the adapter's scaling."""


def to_peft(config: LoraConfig, model: Mapping[str, Any]) -> PeftFiles:
    """The files of an adapter for the model with the config.json `model`.

    Raises OptionError for an invalid adapter, UnsupportedOptionError for an unsupported one.
    """
    from safetensors.torch import save

    parts = list(_parts(config, model))
    tensors, ranks = {}, {}
    for part in parts:
        name = f"{PREFIX}.{part.path}"
        if f"{name}.lora_A.weight" in tensors:
            raise OptionError(f"LoraConfig.config has two rows for the same layer and module, {part.path}")
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = part.a, part.b
        ranks[f"layers.{part.path}"] = len(part.a)
    rank = max(ranks.values())
    smaller_ranks = {name: layer_rank for name, layer_rank in ranks.items() if layer_rank != rank}
    peft_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        # The weights include the scaling, so alpha / r is 1.
        "lora_alpha": rank,
        "target_modules": sorted({part.path.rpartition(".")[2] for part in parts}),
        "bias": "none",
        **({"rank_pattern": smaller_ranks, "alpha_pattern": smaller_ranks} if smaller_ranks else {}),
    }
    return PeftFiles(json.dumps(peft_config).encode(), save(tensors))


def _parts(config: LoraConfig, model: Mapping[str, Any]) -> Iterator[Part]:
    import torch

    weights, rows = torch.as_tensor(config.weights), torch.as_tensor(config.config).tolist()
    if str(weights.dtype).removeprefix("torch.") not in DTYPES:
        raise OptionError(f"LoraConfig.weights has the dtype {weights.dtype}, must be one of {', '.join(DTYPES)}")
    if not rows:
        raise OptionError("LoraConfig.config has no rows")
    if len(rows[0]) not in (3, 4):
        raise OptionError(f"LoraConfig.config has {len(rows[0])} columns, must have 3 or 4")
    for row, values in zip(rows, weights, strict=True):
        module, layer, rank, *dora = row
        if any(dora):
            raise UnsupportedOptionError("LoraConfig.config: DoRA", "only plain LoRA adapters are supported")
        name = MODULES[module] if 0 <= module < len(MODULES) else f"the module id {module}"
        inputs, outputs = _shape(name, model)
        layers = model.get("num_hidden_layers", 0)
        if not 0 <= layer < layers:
            raise OptionError(f"LoraConfig.config: the layer of {name} is {layer}, must be from 0 to {layers - 1}")
        if rank < 1 or rank * (inputs + outputs) > len(values):
            raise OptionError(
                f"LoraConfig.config: the adapter size of {name} in layer {layer} is {rank}, must be at least 1 and at "
                f"most {len(values) // (inputs + outputs)}, for which LoraConfig.weights has values"
            )
        a, b = values[: rank * (inputs + outputs)].split([rank * inputs, rank * outputs])
        # Copied, because safetensors does not save tensors that share memory.
        yield Part(f"{layer}.{NAMES[name]}", a.view(rank, inputs).clone(), b.view(outputs, rank).clone())


def _shape(module: str, model: Mapping[str, Any]) -> tuple[int, int]:
    """The (inputs, outputs) of a linear layer. Raises UnsupportedOptionError."""
    if module not in NAMES:
        reason = "give its parts as separate rows" if module in FUSED else "adapters cannot apply to this module"
        raise UnsupportedOptionError(f"LoraConfig.config: {module}", reason)
    try:
        hidden, heads, inner = (model[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    except KeyError as error:
        raise UnsupportedOptionError("LoraConfig.weights", f"the model's config.json has no {error}") from error
    size = model.get("head_dim") or hidden // heads
    queries, keys = heads * size, (model.get("num_key_value_heads") or heads) * size
    shapes = {
        "attn_q": (hidden, queries),
        "attn_k": (hidden, keys),
        "attn_v": (hidden, keys),
        "attn_dense": (queries, hidden),
        "mlp_h_to_4h": (hidden, inner),
        "mlp_4h_to_h": (inner, hidden),
        "mlp_gate": (hidden, inner),
    }
    return shapes[module]
