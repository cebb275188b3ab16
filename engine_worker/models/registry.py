"""Which class computes which architecture."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine_worker.models.config import NotNativeError
from engine_worker.models.llama import Llama, Mistral, Qwen2
from engine_worker.models.model import Architecture
from engine_worker.models.qwen3 import Qwen3, Qwen3Moe
from sluice.ring.checkpoint import CheckpointError

MODELS: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
}


class ResolvedModel(NamedTuple):
    """The class that computes a checkpoint, and its configuration."""

    architecture: Architecture
    config: Any
    """A ModelConfig."""
    choices: Mapping[str, str]
    """For the log: `implementation`, and `implementation_reason` if it is not our own."""


def model_class(raw: Mapping[str, Any]) -> Architecture:
    """Our own class for `architectures` of config.json. Raises NotNativeError if we have none."""
    names = [str(name) for name in raw.get("architectures") or []]
    for name in names:
        if name in MODELS:
            return MODELS[name]
    raise NotNativeError(f"Sluice has no class of its own for {', '.join(names) or 'no architecture'}")


def find_model(raw: Mapping[str, Any]) -> ResolvedModel:
    """Our own class if it computes what config.json asks for, else transformers' module behind the adapter.

    Raises CheckpointError if neither can serve it.
    """
    try:
        own = model_class(raw)
        return ResolvedModel(own, own.read_config(raw), {"implementation": "sluice"})
    except NotNativeError as error:
        reason = str(error)
    # Imported only if needed: transformers takes seconds to import.
    from engine_worker.models.generic.model import Adapter

    try:
        config = Adapter.read_config(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{reason}; and through transformers: {error}") from error
    return ResolvedModel(Adapter, config, {"implementation": "transformers", "implementation_reason": reason})
