"""Inputs of a request beside its tokens. All can be made and pickled; an executor accepts LoraConfig and
PromptTuningConfig."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.trtllm.errors import OptionError


@dataclass(eq=False)
class LoraConfig:
    """Raises OptionError for tensors of a wrong shape."""

    task_id: int
    weights: Any = None
    """[rows, values]: of each row A [r, inputs], then B [outputs, r], then padding. None: an earlier request had it."""
    config: Any = None
    """[rows, 3]: module id, layer, r; [rows, 4] with whether it is DoRA."""

    def __post_init__(self) -> None:
        if self.weights is None:
            return
        if self.config is None:
            raise OptionError("Request for LoRA inference with lora weights must also have lora config")
        for name in ("weights", "config"):
            if len(getattr(self, name).shape) != 2:
                raise OptionError(f"Expected {name} tensor to have 2 dimensions")
        if self.config.shape[0] != self.weights.shape[0]:
            raise OptionError("Expected dim 0 of lora weights and lora config to have the same size")


@dataclass(eq=False)
class PromptTuningConfig:
    embedding_table: Any
    """[virtual tokens, hidden size]: the input ids from the size of the vocabulary on stand for its rows."""
    input_token_extra_ids: Sequence[int] | None = None
    """One per input id. Cached blocks are shared where they are equal, and the rows too."""


@dataclass
class MultimodalInput:
    multimodal_hashes: Sequence[Sequence[int]]
    multimodal_positions: Sequence[int]
    multimodal_lengths: Sequence[int]


@dataclass(eq=False)
class MropeConfig:
    mrope_rotary_cos_sin: Any
    mrope_position_deltas: Any


@dataclass
class ContextPhaseParams:
    first_gen_tokens: Sequence[int]
    req_id: int
    opaque_state: bytes | None = None
    draft_tokens: Sequence[int] | None = None
