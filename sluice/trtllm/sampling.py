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
    """Number of beams; 1: no beam search."""
    _: KW_ONLY
    top_k: int | None = None
    """Sample from this many most likely tokens; 0: off."""
    top_p: float | None = None
    """Sample from the most likely tokens whose probabilities sum to this; 1: off."""
    top_p_min: float | None = None
    """Not supported."""
    top_p_reset_ids: int | None = None
    """Not supported."""
    top_p_decay: float | None = None
    """Only 1.0 is supported."""
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    """Positive values favour candidates of beams other than the best."""
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    """With beam search: positive values favour longer outputs, negative values shorter ones."""
    early_stopping: int | None = None
    """With beam search: 1 stops at `beam_width` finished beams, 0 once no better one is likely, any other number once
    no better one is possible."""
    no_repeat_ngram_size: int | None = None
    """No sequence of this many tokens may occur twice; 0: off."""
    num_return_sequences: int | None = None
    """Number of outputs; default: 1, or `beam_width` with beam search."""
    min_p: float | None = None
    """Sample from tokens whose probability is at least this times the highest; 0: off."""
    beam_width_array: Sequence[int] | None = None
    """Not supported."""

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
    """Whether results have `log_probs` and `cum_log_probs`."""
    return_context_logits: bool = False
    """Whether results have `context_logits`."""
    return_generation_logits: bool = False
    """Whether results have `generation_logits`."""
    exclude_input_from_output: bool = False
    """Whether to omit the prompt, with which outputs begin otherwise. Streams never include the prompt."""
    return_encoder_output: bool = False
    """Not supported."""
    return_perf_metrics: bool = False
    """Whether results have `request_perf_metrics`."""
    additional_model_outputs: list[AdditionalModelOutput] | None = None
    """Tensors for `Result.additional_outputs`."""
