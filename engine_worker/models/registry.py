"""Which class computes which architecture."""

from collections.abc import Mapping
from typing import Any

from engine_worker.models.llama import Llama
from engine_worker.models.mistral import Mistral
from engine_worker.models.qwen2 import Qwen2
from engine_worker.models.qwen3 import Qwen3
from engine_worker.models.qwen3_moe import Qwen3Moe
from sluice.ring.checkpoint import CheckpointError

MODELS: Mapping[str, type[Llama] | type[Qwen3]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
}


def model_class(config: Mapping[str, Any]) -> type[Llama] | type[Qwen3]:
    """By `architectures` of config.json. Raises CheckpointError on one that is not supported."""
    names = config.get("architectures") or []
    for name in names:
        if name in MODELS:
            return MODELS[name]
    found = ", ".join(map(str, names)) or "none given"
    raise CheckpointError(f"architecture {found} is not supported; supported: {', '.join(sorted(MODELS))}")
