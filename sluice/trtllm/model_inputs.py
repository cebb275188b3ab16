"""Inputs of a request other than its tokens. An executor supports LoraConfig and PromptTuningConfig, and refuses the
others with UnsupportedOptionError."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.trtllm.errors import OptionError


@dataclass(eq=False)
class LoraConfig:
    """A LoRA adapter, with one row of `weights` and `config` per adapted linear layer.

    Raises OptionError for tensors of a wrong shape.
    """

    task_id: int
    """Identifies the adapter."""
    weights: Any = None
    """Tensor [rows, values]; each row has A [r, inputs], B [outputs, r] and padding. None: an earlier request of the
    task had the weights."""
    config: Any = None
    """Tensor [rows, 3] of module id, layer and r, or [rows, 4] with a flag for DoRA."""

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
    """Embeddings for virtual tokens of the prompt. See docs/prompt_tables.md."""

    embedding_table: Any
    """Tensor [virtual tokens, hidden size]. Input id vocab_size + i stands for row i."""
    input_token_extra_ids: Sequence[int] | None = None
    """One per input id. Requests share cached blocks only where these, and the rows, are equal."""


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
