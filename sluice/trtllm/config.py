"""The configuration of an executor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from sluice.trtllm.cache_config import KvCacheConfig
from sluice.trtllm.checked import NOT_NEGATIVE, POSITIVE, Checked, Limit
from sluice.trtllm.enums import BatchingType, CacheTransceiverBackendType
from sluice.trtllm.guided import GuidedDecodingConfig
from sluice.trtllm.parallel import ParallelConfig
from sluice.trtllm.sampling import AdditionalModelOutput
from sluice.trtllm.scheduler import SchedulerConfig
from sluice.trtllm.speculation import DecodingConfig, SpeculativeDecodingConfig

Processor = Callable[..., None] | str
"""A logits post-processor: a function, or the name "module:function" of a function that the engine can import."""


@dataclass
class PeftCacheConfig:
    """The memory of each engine for LoRA adapters."""

    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    optimal_adapter_size: int = 8
    max_adapter_size: int = 64
    num_put_workers: int = 1
    num_ensure_workers: int = 1
    num_copy_streams: int = 1
    max_pages_per_block_host: int = 24
    max_pages_per_block_device: int = 8
    device_cache_percent: float | None = None
    host_cache_size: int | None = None
    lora_prefetch_dir: str | None = None


@dataclass
class NoAdapters(PeftCacheConfig):
    """The default of `ExecutorConfig.peft_cache_config`: engines serve no adapters."""


@dataclass
class LogitsPostProcessorConfig:
    """Functions that change logits before a token is sampled. See docs/processors.md."""

    processor_map: dict[str, Processor] | None = None
    """Functions `(request_id, logits, token_ids, stream, client_id)` by the name that requests use for them."""
    processor_batched: Processor | None = None
    """A function for all requests of a step that use it, with a list of each argument but `stream`."""
    replicate: bool = True
    """Whether all ranks of a tensor-parallel engine call the functions that they can import, not only rank 0."""


@dataclass
class ExtendedRuntimePerfKnobConfig:
    multi_block_mode: bool = True
    enable_context_fmha_fp32_acc: bool = False
    cuda_graph_mode: bool = field(default=False, init=False)
    cuda_graph_cache_size: int = field(default=0, init=False)


@dataclass
class DebugConfig:
    debug_input_tensors: bool = False
    debug_output_tensors: bool = False
    debug_tensor_names: Sequence[str] | None = None
    debug_tensors_max_iterations: int = 0


@dataclass
class CacheTransceiverConfig:
    backend: CacheTransceiverBackendType | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = None
    kv_transfer_sender_future_timeout_ms: int | None = None
    max_num_tokens: int | None = None
    """Deprecated name of `max_tokens_in_buffer`."""


@dataclass
class ExecutorConfig(Checked):
    """The configuration of an `Executor`, which raises UnsupportedOptionError for unsupported options.

    Raises OptionError for a value out of range.
    """

    max_beam_width: int = 1
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_chunked_context: bool = False
    normalize_log_probs: bool = True
    iter_stats_max_iterations: int = 1000
    request_stats_max_iterations: int = 0
    batching_type: BatchingType = BatchingType.INFLIGHT
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    parallel_config: ParallelConfig | None = None
    peft_cache_config: PeftCacheConfig = field(default_factory=NoAdapters)
    logits_post_processor_config: LogitsPostProcessorConfig | None = None
    decoding_config: DecodingConfig | None = None
    use_gpu_direct_storage: bool = False
    gpu_weights_percent: float = 1.0
    max_queue_size: int | None = None
    extended_runtime_perf_knob_config: ExtendedRuntimePerfKnobConfig = field(
        default_factory=ExtendedRuntimePerfKnobConfig
    )
    debug_config: DebugConfig | None = None
    recv_poll_period_ms: int = 0
    max_seq_idle_microseconds: int = 180_000_000
    spec_dec_config: SpeculativeDecodingConfig | None = None
    guided_decoding_config: GuidedDecodingConfig | None = None
    additional_model_outputs: list[AdditionalModelOutput] | None = None
    cache_transceiver_config: CacheTransceiverConfig | None = None
    gather_generation_logits: bool = False
    mm_embedding_offloading: bool = False
    enable_trt_overlap: bool = False
    fail_fast_on_attention_window_too_large: bool = False

    @property
    def logits_post_processor_map(self) -> dict[str, Processor] | None:
        """Deprecated name of `logits_post_processor_config.processor_map`."""
        config = self.logits_post_processor_config
        return None if config is None else config.processor_map

    @logits_post_processor_map.setter
    def logits_post_processor_map(self, processors: dict[str, Processor] | None) -> None:
        config = self.logits_post_processor_config or LogitsPostProcessorConfig()
        self.logits_post_processor_config = replace(config, processor_map=processors)

    @property
    def logits_post_processor_batched(self) -> Processor | None:
        """Deprecated name of `logits_post_processor_config.processor_batched`."""
        config = self.logits_post_processor_config
        return None if config is None else config.processor_batched

    @logits_post_processor_batched.setter
    def logits_post_processor_batched(self, processor: Processor | None) -> None:
        config = self.logits_post_processor_config or LogitsPostProcessorConfig()
        self.logits_post_processor_config = replace(config, processor_batched=processor)

    LIMITS: ClassVar[Mapping[str, Limit]] = {
        "max_beam_width": POSITIVE,
        "iter_stats_max_iterations": NOT_NEGATIVE,
        "request_stats_max_iterations": NOT_NEGATIVE,
        "max_batch_size": POSITIVE,
        "max_num_tokens": POSITIVE,
        "max_seq_idle_microseconds": POSITIVE,
    }
