"""Which class computes which architecture."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine_worker.models.errors import NotComputedError
from engine_worker.models.llama import Llama
from engine_worker.models.mistral import Mistral
from engine_worker.models.model import Architecture
from engine_worker.models.qwen2 import Qwen2
from engine_worker.models.qwen3 import Qwen3
from engine_worker.models.qwen3_moe import Qwen3Moe
from sluice.ring.checkpoint import CheckpointError

MODELS: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
}


class Found(NamedTuple):
    """Who computes a checkpoint."""

    architecture: Architecture
    config: Any
    """A ModelConfig."""
    choices: Mapping[str, str]
    """What was chosen, for the log: `implementation`, and why where it is not our own."""


def model_class(raw: Mapping[str, Any]) -> Architecture:
    """Our own, by `architectures` of config.json. Raises NotComputedError where there is none."""
    names = [str(name) for name in raw.get("architectures") or []]
    for name in names:
        if name in MODELS:
            return MODELS[name]
    raise NotComputedError(f"there is no class of our own for {', '.join(names) or 'no architecture'}")


def find_model(raw: Mapping[str, Any]) -> Found:
    """By config.json: our own class for its `architectures`, or where there is none, or it does not compute what is
    asked for, transformers' module.

    Raises CheckpointError where neither can serve it.
    """
    try:
        own = model_class(raw)
        return Found(own, own.read_config(raw), {"implementation": "sluice"})
    except NotComputedError as error:
        because = str(error)
    # transformers takes seconds to import.
    from engine_worker.models.generic.model import Adapter

    try:
        config = Adapter.read_config(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{because}; and through transformers: {error}") from error
    return Found(Adapter, config, {"implementation": "transformers", "implementation_because": because})
