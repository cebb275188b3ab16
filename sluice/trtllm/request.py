"""A request."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, cast

from sluice.trtllm.cache_config import KvCacheRetentionConfig
from sluice.trtllm.checked import FROM_0_TO_1, NOT_EMPTY, NOT_NEGATIVE, POSITIVE, VECTOR, Checked, Limit
from sluice.trtllm.config import Processor
from sluice.trtllm.enums import RequestType
from sluice.trtllm.errors import OptionError
from sluice.trtllm.guided import GuidedDecodingParams
from sluice.trtllm.model_inputs import ContextPhaseParams, LoraConfig, MropeConfig, MultimodalInput, PromptTuningConfig
from sluice.trtllm.sampling import OutputConfig, SamplingConfig
from sluice.trtllm.speculation import EagleConfig, ExternalDraftTokensConfig, LookaheadDecodingConfig

DEFAULT_PRIORITY = 0.5
BOTH_PHASES = RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION


@dataclass(eq=False)
class Request(Checked):
    """Raises OptionError for values out of range; `Executor.enqueue_request` for what cannot be done."""

    input_token_ids: Sequence[int]
    max_tokens: int = cast(int, None)
    """Required, here or by its former name."""
    _: KW_ONLY
    max_new_tokens: InitVar[int | None] = None
    """Former name of `max_tokens`."""
    streaming: bool = False
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_id: int | None = None
    """None or -1: the output ends at max_tokens, not at the model's end token."""
    pad_id: int | None = None
    """Nothing is padded, so this changes nothing."""
    position_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] | None = None
    stop_words: Sequence[Sequence[int]] | None = None
    embedding_bias: Any = None
    """[vocab]: added to the logits."""
    external_draft_tokens_config: ExternalDraftTokensConfig | None = None
    prompt_tuning_config: PromptTuningConfig | None = None
    multimodal_input: MultimodalInput | None = None
    multimodal_embedding: Any = None
    mrope_config: MropeConfig | None = None
    lora_config: LoraConfig | None = None
    lookahead_config: LookaheadDecodingConfig | None = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    logits_post_processor_name: str | None = None
    logits_post_processor: Processor | None = None
    encoder_input_token_ids: Sequence[int] | None = None
    client_id: int | None = None
    return_all_generated_tokens: bool = False
    priority: float = DEFAULT_PRIORITY
    """0 to 1: below the default is low, above it is high."""
    type: InitVar[RequestType] = BOTH_PHASES
    context_phase_params: ContextPhaseParams | None = None
    encoder_input_features: Any = None
    encoder_output_length: int | None = None
    cross_attention_mask: Any = None
    num_return_sequences: int = 1
    """Former name of `sampling_config.num_return_sequences`, which goes first."""
    eagle_config: EagleConfig | None = None
    skip_cross_attn_blocks: Any = None
    guided_decoding_params: GuidedDecodingParams | None = None
    language_adapter_uid: int | None = None
    allotted_time_ms: timedelta | None = None
    cache_salt_id: int | None = None
    """Only requests with the same one share cached blocks."""
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

    def __post_init__(self, max_new_tokens: int | None, type: RequestType) -> None:  # noqa: A002
        if (self.max_tokens is None) == (max_new_tokens is None):
            raise TypeError("a Request needs max_tokens, or max_new_tokens, which is its former name")
        if max_new_tokens is not None:
            self.max_tokens = max_new_tokens
        self.request_type = type
        if self.guided_decoding_params is not None and self.sampling_config.beam_width > 1:
            raise OptionError("guided_decoding_params cannot be combined with beam search")
