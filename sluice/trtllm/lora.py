"""TensorRT-LLM's tensors of a LoRA adapter as the two files that peft saves."""

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
"""By TensorRT-LLM's module id (cpp/include/tensorrt_llm/runtime/loraModule.h)."""
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_dense": "self_attn.o_proj",
    "mlp_h_to_4h": "mlp.gate_proj",
    "mlp_4h_to_h": "mlp.down_proj",
    "mlp_gate": "mlp.up_proj",
}
"""In checkpoints, within a layer: those of hf_lora_convert.py there."""
PREFIX = "base_model.model.model.layers"
FUSED = ("attn_qkv", "mlp_gate_up")
DTYPES = ("float32", "float16", "bfloat16")


class PeftFiles(NamedTuple):
    config_json: bytes
    safetensors: bytes


class Part(NamedTuple):
    """What an adapter adds to one linear map: B A x."""

    path: str
    """Such as "3.self_attn.q_proj", from the layer on."""
    a: "torch.Tensor"
    """[r, inputs]"""
    b: "torch.Tensor"
    """[outputs, r], with the scaling, as there."""


def to_peft(given: LoraConfig, model: Mapping[str, Any]) -> PeftFiles:
    """`model`: its config.json. Raises OptionError, UnsupportedOptionError."""
    from safetensors.torch import save

    parts = list(_parts(given, model))
    tensors, ranks = {}, {}
    for part in parts:
        name = f"{PREFIX}.{part.path}"
        if f"{name}.lora_A.weight" in tensors:
            raise OptionError(f"LoraConfig.config has two rows for the layer and module {part.path}")
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = part.a, part.b
        ranks[f"layers.{part.path}"] = len(part.a)
    rank = max(ranks.values())
    others = {name: each for name, each in ranks.items() if each != rank}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        # The scaling is in the weights: alpha / r is 1.
        "lora_alpha": rank,
        "target_modules": sorted({part.path.rpartition(".")[2] for part in parts}),
        "bias": "none",
        **({"rank_pattern": others, "alpha_pattern": others} if others else {}),
    }
    return PeftFiles(json.dumps(config).encode(), save(tensors))


def _parts(given: LoraConfig, model: Mapping[str, Any]) -> Iterator[Part]:
    import torch

    weights, rows = torch.as_tensor(given.weights), torch.as_tensor(given.config).tolist()
    if str(weights.dtype).removeprefix("torch.") not in DTYPES:
        raise OptionError(f"LoraConfig.weights has the type {weights.dtype}, must be {', '.join(DTYPES)}")
    if not rows:
        raise OptionError("LoraConfig.config has no rows")
    if len(rows[0]) not in (3, 4):
        raise OptionError(f"LoraConfig.config has {len(rows[0])} columns, must have 3 or 4")
    for row, values in zip(rows, weights, strict=True):
        module, layer, rank, *dora = row
        if any(dora):
            raise UnsupportedOptionError("LoraConfig.config: DoRA", "adapters are plain LoRA here")
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
        # Copies: safetensors saves no two tensors that share memory.
        yield Part(f"{layer}.{NAMES[name]}", a.view(rank, inputs).clone(), b.view(outputs, rank).clone())


def _shape(module: str, model: Mapping[str, Any]) -> tuple[int, int]:
    """(inputs, outputs). Raises UnsupportedOptionError."""
    if module not in NAMES:
        why = "give its parts as rows of their own" if module in FUSED else "models here have no such map for adapters"
        raise UnsupportedOptionError(f"LoraConfig.config: {module}", why)
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
