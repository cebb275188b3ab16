"""`Request`: a prompt with its options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, cast

from sluice.client.values import as_id, as_ids
from sluice.trtllm.cache_config import KvCacheRetentionConfig
from sluice.trtllm.checked import FROM_0_TO_1, NOT_EMPTY, NOT_NEGATIVE, POSITIVE, VECTOR, Checked, Limit
from sluice.trtllm.enums import RequestType
from sluice.trtllm.errors import OptionError
from sluice.trtllm.guided import GuidedDecodingParams
from sluice.trtllm.model_inputs import ContextPhaseParams, LoraConfig, MropeConfig, MultimodalInput, PromptTuningConfig
from sluice.trtllm.sampling import OutputConfig, SamplingConfig
from sluice.trtllm.speculation import EagleConfig, ExternalDraftTokensConfig, LookaheadDecodingConfig

DEFAULT_PRIORITY = 0.5
INTEGERS = ("max_tokens", "end_id", "pad_id", "client_id", "num_return_sequences", "cache_salt_id")
ID_LISTS = ("input_token_ids", "position_ids")
WORDS = ("bad_words", "stop_words")
BOTH_PHASES = RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION


@dataclass(eq=False)
class Request(Checked):
    """A prompt of token ids with its options, for `Executor.enqueue_request`, which refuses unsupported options.

    Raises OptionError for a value out of range.
    """

    input_token_ids: Sequence[int]
    max_tokens: int = cast(int, None)
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
    embedding_bias: Any = None
    """Tensor [vocabulary] to add to the logits."""
    external_draft_tokens_config: ExternalDraftTokensConfig | None = None
    prompt_tuning_config: PromptTuningConfig | None = None
    multimodal_input: MultimodalInput | None = None
    """Not supported."""
    multimodal_embedding: Any = None
    """Not supported."""
    mrope_config: MropeConfig | None = None
    """Not supported."""
    lora_config: LoraConfig | None = None
    lookahead_config: LookaheadDecodingConfig | None = None
    """Not supported."""
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    logits_post_processor_name: str | None = None
    """Name of a function in `ExecutorConfig.logits_post_processor_config`, or `Request.BATCHED_POST_PROCESSOR_NAME`."""
    logits_post_processor: Callable[..., None] | None = None
    """Function `(request_id, logits, token_ids, stream, client_id)` of this request, which runs in this program and
    changes the logits [1, 1, vocabulary] in place. Cannot be combined with `logits_post_processor_name`."""
    encoder_input_token_ids: Sequence[int] | None = None
    """Not supported."""
    client_id: int | None = None
    """Returned in every response and passed to logits post-processors. Need not be unique."""
    return_all_generated_tokens: bool = False
    """Whether each response of a stream repeats the tokens before it."""
    priority: float = DEFAULT_PRIORITY
    """From 0 to 1. Values below the default are low priority, values above it high priority."""
    type: InitVar[RequestType] = BOTH_PHASES
    """Only the default is supported."""
    context_phase_params: ContextPhaseParams | None = None
    """Not supported."""
    encoder_input_features: Any = None
    """Not supported."""
    encoder_output_length: int | None = None
    """Not supported."""
    cross_attention_mask: Any = None
    """Not supported."""
    num_return_sequences: int = 1
    """Deprecated name of `sampling_config.num_return_sequences`, which takes precedence."""
    eagle_config: EagleConfig | None = None
    """Not supported."""
    skip_cross_attn_blocks: Any = None
    """Not supported."""
    guided_decoding_params: GuidedDecodingParams | None = None
    language_adapter_uid: int | None = None
    """Not supported."""
    allotted_time_ms: timedelta | None = None
    """Time after which the outputs end with TIMED_OUT and the tokens so far."""
    cache_salt_id: int | None = None
    """Only requests with the same salt share cached blocks."""
    request_type: RequestType = field(init=False)

    BATCHED_POST_PROCESSOR_NAME: ClassVar[str] = "batched"
    LIMITS: ClassVar[Mapping[str, Limit]] = {
        "input_token_ids": NOT_EMPTY,
        "max_tokens": POSITIVE,
        "embedding_bias": VECTOR,
        "priority": FROM_0_TO_1,
        "num_return_sequences": POSITIVE,
        "cache_salt_id": NOT_NEGATIVE,
    }

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
