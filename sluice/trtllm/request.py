"""`Request`: a prompt with its options, and the classes of these options."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from datetime import timedelta
from enum import Enum
from itertools import zip_longest
from typing import Annotated, Any, ClassVar, cast

from sluice.client.values import as_id, as_ids
from sluice.trtllm.enums import KvCacheTransferMode, RequestType
from sluice.trtllm.options import (
    ABOVE_0_TO_1,
    FROM_0_TO_1,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    VECTOR,
    Checked,
    OptionError,
    Unsupported,
    from_to,
)
from sluice.trtllm.speculation import EagleConfig, ExternalDraftTokensConfig, LookaheadDecodingConfig

MAX_BEAM_WIDTH = 1024
DEFAULT_PRIORITY = 0.5
DEFAULT_RETENTION = 35
RETENTION = from_to(0, 100)
INTEGERS = ("max_tokens", "end_id", "pad_id", "client_id", "num_return_sequences", "cache_salt_id")
ID_LISTS = ("input_token_ids", "position_ids")
WORDS = ("bad_words", "stop_words")
BOTH_PHASES = RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION

DECODER_ONLY = Unsupported("only decoder-only models are served")
MULTIMODAL = Unsupported("images and other modalities are not implemented")
MODEL_DRAFTS = Unsupported(
    "draft tokens can only come from external_draft_tokens_config, or from the engine's n-grams or draft model"
)
ONE_ENGINE = Unsupported("context and generation always run in the same engine")
NO_DECAY = Unsupported("top_p does not decay")


@dataclass
class SamplingConfig(Checked):
    """How tokens are sampled. None is TensorRT-LLM's default: greedy unless `top_k` or `top_p` is set, with temperature
    1 and seed 0 otherwise.

    Raises OptionError for a value out of range.
    """

    beam_width: Annotated[int, from_to(1, MAX_BEAM_WIDTH)] = 1
    """Number of beams; 1: no beam search."""
    _: KW_ONLY
    top_k: Annotated[int | None, NOT_NEGATIVE] = None
    """Sample from this many most likely tokens; 0: off."""
    top_p: Annotated[float | None, ABOVE_0_TO_1] = None
    """Sample from the most likely tokens whose probabilities sum to this; 1: off."""
    top_p_min: Annotated[float | None, FROM_0_TO_1, NO_DECAY] = None
    top_p_reset_ids: Annotated[int | None, NOT_NEGATIVE, NO_DECAY] = None
    top_p_decay: Annotated[float | None, ABOVE_0_TO_1] = None
    """Only 1.0 is supported."""
    seed: int | None = None
    temperature: Annotated[float | None, NOT_NEGATIVE] = None
    min_tokens: Annotated[int | None, NOT_NEGATIVE] = None
    beam_search_diversity_rate: Annotated[float | None, NOT_NEGATIVE] = None
    """Positive values favour candidates of beams other than the best."""
    repetition_penalty: Annotated[float | None, POSITIVE] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    """With beam search: positive values favour longer outputs, negative values shorter ones."""
    early_stopping: int | None = None
    """With beam search: 1 stops at `beam_width` finished beams, 0 once no better one is likely, any other number once
    no better one is possible."""
    no_repeat_ngram_size: Annotated[int | None, NOT_NEGATIVE] = None
    """No sequence of this many tokens may occur twice; 0: off."""
    num_return_sequences: Annotated[int | None, POSITIVE] = None
    """Number of outputs; default: 1, or `beam_width` with beam search."""
    min_p: Annotated[float | None, FROM_0_TO_1] = None
    """Sample from tokens whose probability is at least this fraction of the highest; 0: off."""
    beam_width_array: Annotated[Sequence[int] | None, Unsupported("the width of a beam search is constant")] = None

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
    return_encoder_output: Annotated[bool, DECODER_ONLY] = False
    return_perf_metrics: bool = False
    """Whether results have `request_perf_metrics`."""
    additional_model_outputs: list[AdditionalModelOutput] | None = None
    """Tensors for `Result.additional_outputs`."""


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


class GuideType(Enum):
    JSON = 0
    JSON_SCHEMA = 1
    REGEX = 2
    EBNF_GRAMMAR = 3
    STRUCTURAL_TAG = 4


@dataclass
class GuidedDecodingParams:
    """A constraint on the output of a request. Raises OptionError for a type without its guide."""

    guide_type: GuideType
    guide: str | None = None

    GuideType: ClassVar[type[GuideType]] = GuideType

    def __post_init__(self) -> None:
        if self.guide is None and self.guide_type is not GuideType.JSON:
            raise OptionError(f"GuidedDecodingParams: {self.guide_type.name} needs a guide")


@dataclass
class TokenRangeRetentionConfig(Checked):
    """Retention priority, from 0 to 100, of the blocks of the prompt tokens [token_start, token_end)."""

    token_start: int
    token_end: int | None
    priority: Annotated[int, RETENTION]
    duration_ms: timedelta | None = None


@dataclass
class KvCacheRetentionConfig(Checked):
    """Retention priorities of a request's blocks. The ranges become sorted.

    Raises OptionError for an empty range, or for ranges that overlap.
    """

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig]
    decode_retention_priority: Annotated[int, RETENTION] = DEFAULT_RETENTION
    decode_duration_ms: timedelta | None = None
    transfer_mode: KvCacheTransferMode = KvCacheTransferMode.DRAM
    directory: str | None = None

    TokenRangeRetentionConfig: ClassVar[type[TokenRangeRetentionConfig]] = TokenRangeRetentionConfig

    def __post_init__(self) -> None:
        configs = sorted(self.token_range_retention_configs, key=lambda config: config.token_start)
        self.token_range_retention_configs = configs
        for config, following in zip_longest(configs, configs[1:]):
            _check_range(config, following)


def _check_range(config: TokenRangeRetentionConfig, following: TokenRangeRetentionConfig | None) -> None:
    name = f"the token range [{config.token_start}, {config.token_end})"
    if config.token_start < 0 or (config.token_end is not None and config.token_start >= config.token_end):
        raise OptionError(f"{name} must start at 0 or later and must not be empty")
    if following is not None and (config.token_end is None or config.token_end > following.token_start):
        raise OptionError(f"{name} overlaps the range that starts at {following.token_start}")


@dataclass(eq=False)
class Request(Checked):
    """A prompt of token ids with its options, for `Executor.enqueue_request`, which refuses unsupported options.

    Raises OptionError for a value out of range.
    """

    input_token_ids: Annotated[Sequence[int], NOT_EMPTY]
    max_tokens: Annotated[int, POSITIVE] = cast(int, None)
    """Maximum number of tokens to generate. Required, here or as `max_new_tokens`."""
    _: KW_ONLY
    max_new_tokens: InitVar[int | None] = None
    """Deprecated name of `max_tokens`."""
    streaming: bool = False
    """Whether there is a response per token; otherwise there is one per output, at its end."""
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_id: int | None = None
    """Token that ends the output. None or -1: the output ends at `max_tokens`, not at the model's end token."""
    pad_id: int | None = None
    """No effect, since nothing is padded."""
    position_ids: Sequence[int] | None = None
    """Only 0, 1, 2, … is supported."""
    bad_words: Sequence[Sequence[int]] | None = None
    """Token ids of words that must not be generated."""
    stop_words: Sequence[Sequence[int]] | None = None
    """Token ids of words that end the output."""
    embedding_bias: Annotated[Any, VECTOR] = None
    """Tensor [vocabulary] to add to the logits."""
    external_draft_tokens_config: ExternalDraftTokensConfig | None = None
    prompt_tuning_config: PromptTuningConfig | None = None
    multimodal_input: Annotated[MultimodalInput | None, MULTIMODAL] = None
    multimodal_embedding: Annotated[Any, MULTIMODAL] = None
    mrope_config: Annotated[MropeConfig | None, MULTIMODAL] = None
    lora_config: LoraConfig | None = None
    lookahead_config: Annotated[LookaheadDecodingConfig | None, MODEL_DRAFTS] = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    logits_post_processor_name: str | None = None
    """Name of a function in `ExecutorConfig.logits_post_processor_config`, or `Request.BATCHED_POST_PROCESSOR_NAME`."""
    logits_post_processor: Callable[..., None] | None = None
    """Function `(request_id, logits, token_ids, stream, client_id)` of this request, which runs in this program and
    changes the logits [1, 1, vocabulary] in place. Cannot be combined with `logits_post_processor_name`."""
    encoder_input_token_ids: Annotated[Sequence[int] | None, DECODER_ONLY] = None
    client_id: int | None = None
    """Returned in every response and passed to logits post-processors. Need not be unique."""
    return_all_generated_tokens: bool = False
    """Whether each response of a stream repeats the tokens before it."""
    priority: Annotated[float, FROM_0_TO_1] = DEFAULT_PRIORITY
    """From 0 to 1. Values below the default are low priority, values above it high priority."""
    type: InitVar[RequestType] = BOTH_PHASES
    """Only the default is supported."""
    context_phase_params: Annotated[ContextPhaseParams | None, ONE_ENGINE] = None
    encoder_input_features: Annotated[Any, DECODER_ONLY] = None
    encoder_output_length: Annotated[int | None, DECODER_ONLY] = None
    cross_attention_mask: Annotated[Any, DECODER_ONLY] = None
    num_return_sequences: Annotated[int, POSITIVE] = 1
    """Deprecated name of `sampling_config.num_return_sequences`, which takes precedence."""
    eagle_config: Annotated[EagleConfig | None, MODEL_DRAFTS] = None
    skip_cross_attn_blocks: Annotated[Any, DECODER_ONLY] = None
    guided_decoding_params: GuidedDecodingParams | None = None
    language_adapter_uid: Annotated[int | None, DECODER_ONLY] = None
    allotted_time_ms: timedelta | None = None
    """Time after which the outputs end with TIMED_OUT and the tokens so far."""
    cache_salt_id: Annotated[int | None, NOT_NEGATIVE] = None
    """Only requests with the same salt share cached blocks."""
    request_type: Annotated[RequestType, ONE_ENGINE] = field(default=BOTH_PHASES, init=False)

    BATCHED_POST_PROCESSOR_NAME: ClassVar[str] = "batched"

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value if value is None else _as_integers(name, value))

    def __post_init__(self, max_new_tokens: int | None, type: RequestType) -> None:  # noqa: A002
        if (self.max_tokens is None) == (max_new_tokens is None):
            raise TypeError("a Request needs either max_tokens or max_new_tokens, its deprecated name")
        if max_new_tokens is not None:
            self.max_tokens = max_new_tokens
        self.request_type = type
        if self.guided_decoding_params is not None and self.sampling_config.beam_width > 1:
            raise OptionError("guided_decoding_params cannot be combined with beam search")


def _as_integers(name: str, value: Any) -> Any:
    """The value of a field, whose ids may be numpy's or torch's integers, as Python's.

    Raises TypeError, with the place, for what is not an integer, OptionError for an empty word.
    """
    option = f"Request.{name}"
    if name in INTEGERS:
        return as_id(option, value)
    if name in ID_LISTS:
        return as_ids(option, value)
    if name not in WORDS:
        return value
    words = [as_ids(f"{option}[{i}]", word) for i, word in enumerate(value)]
    if [] in words:
        raise OptionError(f"{option}[{words.index([])}] is [], must be not empty")
    return words
