"""How tokens are sampled, and what is returned in addition to them."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from sluice.trtllm.checked import (
    ABOVE_0_TO_1,
    FROM_0_TO_1,
    NOT_NEGATIVE,
    POSITIVE,
    Checked,
    Limit,
    from_to,
)
from sluice.trtllm.errors import OptionError

MAX_BEAM_WIDTH = 1024


@dataclass
class SamplingConfig(Checked):
    """How tokens are sampled. None is TensorRT-LLM's default: greedy unless `top_k` or `top_p` is set, with temperature
    1 and seed 0 otherwise.

    Raises OptionError for a value out of range.
    """

    beam_width: int = 1
    _: KW_ONLY
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    num_return_sequences: int | None = None
    min_p: float | None = None
    beam_width_array: Sequence[int] | None = None

    LIMITS: ClassVar[Mapping[str, Limit]] = {
        "beam_width": from_to(1, MAX_BEAM_WIDTH),
        "top_k": NOT_NEGATIVE,
        "top_p": ABOVE_0_TO_1,
        "top_p_min": FROM_0_TO_1,
        "top_p_reset_ids": NOT_NEGATIVE,
        "top_p_decay": ABOVE_0_TO_1,
        "temperature": NOT_NEGATIVE,
        "min_tokens": NOT_NEGATIVE,
        "beam_search_diversity_rate": NOT_NEGATIVE,
        "repetition_penalty": POSITIVE,
        "no_repeat_ngram_size": NOT_NEGATIVE,
        "num_return_sequences": POSITIVE,
        "min_p": FROM_0_TO_1,
    }

    def __setattr__(self, name: str, value: Any) -> None:
        # `beam_width` is the first field, so it has been set.
        if name == "num_return_sequences" and value is not None and 1 < self.beam_width < value:
            width = f"beam_width, which is {self.beam_width}"
            raise OptionError(f"num_return_sequences is {value}, must be at most {width}")
        super().__setattr__(name, value)


@dataclass
class AdditionalModelOutput:
    """A named tensor of the model to return."""

    name: str
    gather_context: bool = False
    """Whether to return its rows for prompt positions too."""


@dataclass
class OutputConfig:
    """What is returned in addition to tokens."""

    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False
    """Whether to omit the prompt, with which outputs begin otherwise. Streams never include the prompt."""
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[AdditionalModelOutput] | None = None
