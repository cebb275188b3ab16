"""`ExecutorConfig`: the configuration of an executor."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from enum import Enum
from typing import Annotated, Any, ClassVar

from sluice.trtllm.enums import (
    BatchingType,
    CacheTransceiverBackendType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    CommunicationType,
    ContextChunkingPolicy,
)
from sluice.trtllm.options import (
    ALL_POSITIVE,
    FRACTION,
    NO_EFFECT,
    NOT_NEGATIVE,
    POSITIVE,
    Checked,
    Unsupported,
    from_to,
)
from sluice.trtllm.request import DECODER_ONLY, ONE_ENGINE, AdditionalModelOutput
from sluice.trtllm.speculation import DecodingConfig, SpeculativeDecodingConfig

NOT_SET: Any = 0
"""The default of a flag that is False in TensorRT-LLM: equal to False, but not a bool."""
Processor = Callable[..., None] | str
"""A logits post-processor: a function, or the name "module:function" of a function that the engine can import."""

NOT_IMPLEMENTED = Unsupported("it is not implemented")
ALL_PRIORITIES = Unsupported("blocks of every priority are offloaded to host memory")
OTHER_SIZES = Unsupported("set the size of the cache with max_tokens or free_gpu_memory_fraction")
WHOLE_WINDOWS = Unsupported("windows are never reduced: a request that does not fit is refused")
OWN_SERVICES = Unsupported("every executor starts its own services")
NO_RANKS = Unsupported("there are no MPI ranks: the executor starts its own services")
ONE_MACHINE = Unsupported(
    "an executor starts its ring on this machine; GenerationExecutor.connect uses a ring on others"
)
NO_PAGE_BLOCKS = Unsupported("pages are not grouped into blocks")


@dataclass
class RuntimeDefaults:
    """A model's values for fields of `KvCacheConfig` that are not set."""

    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None


@dataclass
class KvCacheConfig(Checked):
    """The KV cache of each engine. Raises OptionError for a value out of range."""

    enable_block_reuse: bool = True
    """Whether requests share the blocks of common prompt prefixes."""
    max_tokens: Annotated[int | None, POSITIVE] = None
    """Capacity in tokens. If `free_gpu_memory_fraction` is given too, the smaller capacity applies."""
    max_attention_window: Annotated[list[int] | None, ALL_POSITIVE] = None
    """Attention window of each layer, in tokens; repeated over the layers."""
    sink_token_length: Annotated[int | None, POSITIVE, Unsupported("attention sinks are not implemented")] = None
    free_gpu_memory_fraction: Annotated[float | None, FRACTION] = None
    """Fraction of the free device memory, in (0, 1)."""
    host_cache_size: int | None = None
    """Main memory for blocks evicted from the device, in bytes."""
    onboard_blocks: Annotated[bool, Unsupported("blocks in host memory are always copied back before use")] = True
    """Only True is supported: blocks in host memory are always copied back before use."""
    cross_kv_cache_fraction: Annotated[float | None, FRACTION, DECODER_ONLY] = None
    secondary_offload_min_priority: Annotated[int | None, ALL_PRIORITIES] = None
    event_buffer_max_size: Annotated[int, from_to(0, 1 << 20)] = 0
    """KV cache events that each engine buffers; 0: none are recorded."""
    _: KW_ONLY
    enable_partial_reuse: bool = True
    """No effect, like `copy_on_partial_reuse`: only whole blocks are reused."""
    copy_on_partial_reuse: bool = True
    use_uvm: Annotated[bool, NOT_IMPLEMENTED] = False
    attention_dp_events_gather_period_ms: Annotated[int, NO_EFFECT] = 5
    runtime_defaults: InitVar[RuntimeDefaults | None] = None
    max_gpu_total_bytes: Annotated[int, OTHER_SIZES] = 0

    def __post_init__(self, runtime_defaults: RuntimeDefaults | None) -> None:
        if runtime_defaults is not None:
            self.fill_empty_fields_from_runtime_defaults(runtime_defaults)

    def fill_empty_fields_from_runtime_defaults(self, runtime_defaults: RuntimeDefaults) -> None:
        if self.max_attention_window is None:
            self.max_attention_window = runtime_defaults.max_attention_window
        if self.sink_token_length is None:
            self.sink_token_length = runtime_defaults.sink_token_length


@dataclass
class DynamicBatchConfig:
    enable_batch_size_tuning: bool
    enable_max_num_tokens_tuning: bool
    dynamic_batch_moving_average_window: int


@dataclass
class SchedulerConfig:
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None


@dataclass
class OrchestratorConfig:
    """No effect with its defaults: an executor always starts its services as child processes, like an orchestrator."""

    is_orchestrator: Annotated[bool, OWN_SERVICES] = True
    worker_executable_path: str = ""
    """No effect: the services are Sluice's, not TensorRT-LLM's worker."""
    orch_leader_comm: Annotated[Any, NO_RANKS] = None
    spawn_processes: Annotated[bool, OWN_SERVICES] = True


@dataclass
class ParallelConfig:
    communication_type: CommunicationType = CommunicationType.MPI
    communication_mode: CommunicationMode = CommunicationMode.LEADER
    device_ids: Annotated[Sequence[int] | None, Unsupported("set CUDA_VISIBLE_DEVICES")] = None
    participant_ids: Annotated[Sequence[int] | None, NO_RANKS] = None
    orchestrator_config: OrchestratorConfig | None = None
    num_nodes: Annotated[int | None, ONE_MACHINE] = None


class GuidedDecodingBackend(Enum):
    XGRAMMAR = 0
    LLGUIDANCE = 1


@dataclass
class GuidedDecodingConfig:
    """No effect: guided decoding is always enabled, with llguidance, the checkpoint's tokenizer and its end tokens."""

    backend: GuidedDecodingBackend
    encoded_vocab: Sequence[str] | None = None
    tokenizer_str: str | None = None
    stop_token_ids: Sequence[int] | None = None

    GuidedDecodingBackend: ClassVar[type[GuidedDecodingBackend]] = GuidedDecodingBackend


@dataclass
class PeftCacheConfig:
    """The memory of each engine for LoRA adapters."""

    num_host_module_layer: int = 0
    """Capacity of the host cache, in LoRA ranks of one linear layer; 0: unset."""
    num_device_module_layer: int = 0
    """Capacity of the device cache, in LoRA ranks of one linear layer; 0: unset."""
    optimal_adapter_size: int = 8
    """LoRA ranks per page of device memory."""
    max_adapter_size: int = 64
    """Largest LoRA rank of an adapter."""
    num_put_workers: int = 1
    """Threads that read adapter files."""
    num_ensure_workers: Annotated[int, NO_EFFECT] = 1
    num_copy_streams: Annotated[int, NO_EFFECT] = 1
    max_pages_per_block_host: Annotated[int, NO_PAGE_BLOCKS] = 24
    max_pages_per_block_device: Annotated[int, NO_PAGE_BLOCKS] = 8
    device_cache_percent: float | None = None
    """Fraction of the free device memory for adapters, from 0 to 1."""
    host_cache_size: int | None = None
    """Main memory for adapters, in bytes."""
    lora_prefetch_dir: str | None = None
    """Folder whose subfolders, named by task id, are adapters in peft's or TensorRT-LLM's format."""


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
    """Write all inputs of the model."""
    debug_output_tensors: bool = False
    """Write the logits."""
    debug_tensor_names: Sequence[str] | None = None
    """Write these arrays."""
    debug_tensors_max_iterations: int = 0
    """Steps kept for `Executor.get_latest_debug_tensors`; 0: all steps stay in files."""


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

    max_beam_width: Annotated[int, POSITIVE] = 1
    """Largest `SamplingConfig.beam_width` of a request."""
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_chunked_context: bool = NOT_SET
    """Whether a prompt may be computed in several steps. Not set, which reads as False: the engine's default."""
    normalize_log_probs: bool = True
    iter_stats_max_iterations: Annotated[int, NOT_NEGATIVE] = 1000
    """Steps kept for `Executor.get_latest_iteration_stats`; 0: none."""
    request_stats_max_iterations: Annotated[int, NOT_NEGATIVE] = 0
    """Requests kept for `Executor.get_latest_request_stats`; 0: none."""
    batching_type: BatchingType = BatchingType.INFLIGHT
    max_batch_size: Annotated[int | None, POSITIVE] = None
    """Maximum number of sequences in a step; None: the engine's default."""
    max_num_tokens: Annotated[int | None, POSITIVE] = None
    """Maximum number of tokens in a step; None: the engine's default."""
    parallel_config: ParallelConfig | None = None
    peft_cache_config: PeftCacheConfig = field(default_factory=NoAdapters)
    """Engines serve LoRA adapters only if this is set."""
    logits_post_processor_config: LogitsPostProcessorConfig | None = None
    decoding_config: DecodingConfig | None = None
    """Medusa, Lookahead, ExplicitDraftTokens and Eagle are not supported."""
    use_gpu_direct_storage: Annotated[bool, NOT_IMPLEMENTED] = False
    gpu_weights_percent: Annotated[float, Unsupported("all weights are always on the device")] = 1.0
    """Only 1.0 is supported."""
    max_queue_size: int | None = None
    """Maximum number of requests that wait in the router; None: the router's default."""
    extended_runtime_perf_knob_config: ExtendedRuntimePerfKnobConfig = field(
        default_factory=ExtendedRuntimePerfKnobConfig
    )
    debug_config: DebugConfig | None = None
    recv_poll_period_ms: Annotated[int, NO_EFFECT] = 0
    max_seq_idle_microseconds: Annotated[int, POSITIVE, NO_EFFECT] = 180_000_000
    spec_dec_config: SpeculativeDecodingConfig | None = None
    guided_decoding_config: GuidedDecodingConfig | None = None
    """No effect: guided decoding is always enabled."""
    additional_model_outputs: list[AdditionalModelOutput] | None = None
    """Tensors that requests may ask for: "hidden_states" and "layers.N"."""
    cache_transceiver_config: Annotated[CacheTransceiverConfig | None, ONE_ENGINE] = None
    gather_generation_logits: bool = False
    """No effect: requests can always ask for their logits."""
    mm_embedding_offloading: Annotated[bool, Unsupported("multimodal embeddings are not implemented")] = False
    enable_trt_overlap: bool = False
    """Turns on the engine's setting `overlap`."""
    fail_fast_on_attention_window_too_large: Annotated[bool, WHOLE_WINDOWS] = False

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
