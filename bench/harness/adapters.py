"""Random LoRA adapters in peft's format, for any decoder with Llama's names."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from sluice.wire.adapters import Adapter, AdapterFiles

TARGETS = {
    "self_attn.q_proj": ("hidden", "queries"),
    "self_attn.k_proj": ("hidden", "pairs"),
    "self_attn.v_proj": ("hidden", "pairs"),
    "self_attn.o_proj": ("queries", "hidden"),
    "mlp.gate_proj": ("hidden", "inside"),
    "mlp.up_proj": ("hidden", "inside"),
    "mlp.down_proj": ("inside", "hidden"),
}
DEVIATION = 0.01


def write_adapter(folder: Path, model: Path, rank: int, seed: int, deviation: float = DEVIATION) -> Adapter:
    """An adapter of all TARGETS; `deviation` is the standard deviation of the values of both factors."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    sizes = {
        "hidden": config["hidden_size"],
        "inside": config["intermediate_size"],
        "queries": config["num_attention_heads"] * head_dim,
        "pairs": config["num_key_value_heads"] * head_dim,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for target, (inputs, outputs) in TARGETS.items():
            for side, shape in (("A", (rank, sizes[inputs])), ("B", (sizes[outputs], rank))):
                name = f"base_model.model.model.layers.{layer}.{target}.lora_{side}.weight"
                tensors[name] = deviation * torch.randn(shape, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    files = AdapterFiles(*((folder / f"adapter_{name}").read_bytes() for name in ("config.json", "model.safetensors")))
    return Adapter(folder.name, files.version, str(folder))
