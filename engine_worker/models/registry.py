"""Maps the architecture named in config.json to the class that implements it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine_worker.models.config import NotNativeError
from engine_worker.models.llama import Llama, Mistral, Qwen2
from engine_worker.models.model import Architecture
from engine_worker.models.qwen3 import Qwen3, Qwen3Moe
from sluice.checkpoint.errors import CheckpointError

MODELS: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
}


class ResolvedModel(NamedTuple):
    """The class that implements a checkpoint's architecture, and the configuration that it has read."""

    architecture: Architecture
    config: Any
    """A ModelConfig."""
    choices: Mapping[str, str]
    """For the log: `implementation`, and `implementation_reason` if the implementation is not Sluice's."""


def model_class(raw: Mapping[str, Any]) -> Architecture:
    """Sluice's class for `architectures` of config.json. Raises NotNativeError if Sluice has no such class."""
    names = [str(name) for name in raw.get("architectures") or []]
    for name in names:
        if name in MODELS:
            return MODELS[name]
    missing = f"architecture {', '.join(names)}" if names else "a checkpoint without architectures in config.json"
    raise NotNativeError(f"Sluice has no native implementation of {missing}")


def find_model(raw: Mapping[str, Any]) -> ResolvedModel:
    """Sluice's class if it supports every option of config.json, otherwise transformers' module behind the adapter.

    Raises CheckpointError if neither can serve the checkpoint.
    """
    try:
        native = model_class(raw)
        return ResolvedModel(native, native.read_config(raw), {"implementation": "sluice"})
    except NotNativeError as error:
        reason = str(error)
    # A local import: importing transformers takes seconds.
    from engine_worker.models.generic.model import Adapter

    try:
        config = Adapter.read_config(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{reason}; with transformers: {error}") from error
    return ResolvedModel(Adapter, config, {"implementation": "transformers", "implementation_reason": reason})
