"""Inputs of a request beside its tokens. All can be made and pickled; of them, PromptTuningConfig is taken."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class LoraConfig:
    task_id: int
    weights: Any = None
    config: Any = None


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
