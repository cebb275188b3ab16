"""Sections of the engine's settings, which its parts take whole."""

from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, get_args

from sluice.settings.fields import LAUNCHER, ByteCount, NotEmpty, PositiveInt, PositiveSeconds, PriorityAging, Range

ChunkingPolicy = Literal["first_come_first_served", "equal_progress"]
CapacityPolicy = Literal["max_utilization", "guaranteed_no_evict", "static_batch"]
CAPACITY_POLICIES: tuple[CapacityPolicy, ...] = get_args(CapacityPolicy)

ThreadCount = Annotated[int, Range(ge=0, le=1024)]
EngineCount = Annotated[int, Range(ge=1, le=4096), LAUNCHER]


@dataclass(frozen=True)
class BatchSize:
    """Batch"""

    max_batch_size: Annotated[int, Range(ge=1, le=4096)] = 64
    """Sequences in a step, and sequences that hold KV cache memory."""
    max_tokens_per_step: Annotated[int, Range(ge=1, le=1 << 20)] = 512
    """Tokens that a step computes, prompt tokens included. At least max_batch_size."""


@dataclass(frozen=True)
class Compute:
    """Model execution"""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights, activations and KV cache. auto: float32 on a CPU, the model's own on a GPU. A CPU with units for
    bfloat16 can have that too, with backend = openvino; never float16."""
    backend: Literal["auto", "openvino", "torch"] = "auto"
    """What computes the model. auto: OpenVINO on a CPU if it knows the model, else torch. See docs/models.md."""
    quantize: Literal["none", "int8", "int4"] = "none"
    """Precision of the weights, with backend = openvino: int8 is faster and takes less memory, int4 takes the least.
    See docs/operations.md for what they cost."""
    weights_folder: str | None = None
    """Keep the weights, with backend = openvino, in a file in this folder, so that they take their size in memory once,
    not twice; default: no file. See docs/operations.md."""
    kv_precision: Literal["auto", "float32", "bfloat16", "float16", "u8"] = "auto"
    """Of the KV cache, with backend = openvino. auto: as `dtype`. bfloat16 only with that dtype."""
    attention: Literal["auto", "flash", "varlen", "triton", "reference", "cpu"] = "auto"
    """Attention backend. auto: the first that is right on this device, see docs/gpu.md."""
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """random: for benchmarks of a model's shape; the folder needs no weights."""
    threads: ThreadCount = 0
    """CPU threads of a step; 0: the cores that this process may use, less one, or an equal share of them under
    `sluice serve`."""
    default_threads: Annotated[ThreadCount, LAUNCHER] = 0
    """CPU threads if `threads` is 0."""
    max_attention_window: tuple[PositiveInt, ...] = ()
    """Tokens that a token attends to: one number, or several that repeat over the layers. A model's own sliding window
    applies too."""
    overlap: bool | None = None
    """Schedule a step while the one before it is computed; default: on a GPU."""
    cuda_graphs: bool = True
    """On a GPU launch the kernels of most steps as one CUDA graph. Costs memory, and seconds at the start."""
    fused_kernels: bool = True
    """On a GPU use Sluice's Triton kernels beside attention: in layers, in sampling, and for KV cache writes."""

    @property
    def step_threads(self) -> int | None:
        """None: by the number of cores."""
        return self.threads or self.default_threads or None


@dataclass(frozen=True)
class KvCacheSize:
    """KV cache"""

    tokens_per_block: Annotated[int, Range(ge=0, le=1024)] = 0
    """0: 16, or what the backend needs: OpenVINO has blocks of 32."""
    kv_cache_tokens: Annotated[int | None, Range(ge=1)] = None
    """Size of the KV cache in tokens; default: by kv_memory_fraction. If both are given, the smaller size holds."""
    kv_memory_fraction: Annotated[float | None, Range(gt=0, le=0.95)] = None
    """Part of the memory left after loading that the KV cache gets; default, without kv_cache_tokens: 0.9 on a GPU, 0.5
    on a CPU, in equal shares for the engines of one `sluice serve`."""
    kv_host_memory: ByteCount = 0
    """Host memory for blocks that are evicted from the KV cache, such as 8GiB; 0: none."""
    engines_here: EngineCount = 1
    """Engines that share the memory of this machine."""
    engines_per_gpu: EngineCount = 1
    """Engines that share the GPUs of this one."""


@dataclass(frozen=True)
class SchedulerNames:
    """Scheduler"""

    capacity_scheduler_policy: str = "max_utilization"
    """Which requests may hold KV cache memory: max_utilization, guaranteed_no_evict, static_batch or your own
    module:Class; see docs/scheduling.md."""
    micro_batch_scheduler: str | None = None
    """Which of them run in a step: your own module:Class; default: all that fit."""
    scheduler: str | None = None
    """Both in one: your own module:Class, a RequestScheduler."""


RESERVED_TENSORS: Final = frozenset({"logits", "context_logits", "generation_logits", "hidden_states"})
"""Names of tensors that every engine has."""
BATCHED: Final = "batched"
"""Name of the batched logits processor in a request."""


@dataclass(frozen=True)
class ProcessorNames:
    """Logits processors"""

    logits_processors: dict[str, str] = field(default_factory=dict)
    """Functions that requests may have change their logits, by name, such as {"upper": "my_module:upper_only"}, or
    ipc:// addresses of programs on this machine; see docs/processors.md."""
    logits_processor_batched: str | None = None
    """Your module:function that changes the logits of all sequences that ask for "batched" in one call."""
    logits_processor_replicate: bool = False
    """With tensor parallelism, call them on the other ranks too, with the same arguments; only the result of rank 0
    counts."""
    logits_processor_timeout: PositiveSeconds = 10.0
    """Seconds that a call of a processor in another program may take; then its sequences end with an error. Less than
    the router's stall_timeout."""

    @property
    def processor_names(self) -> list[str]:
        """Those that requests may name."""
        return [*self.logits_processors, *([] if self.logits_processor_batched is None else [BATCHED])]


@dataclass(frozen=True)
class OutputLayers:
    """Layers for clients"""

    output_layers: tuple[Annotated[int, Range(ge=0, le=4095)], ...] = ()
    """Layers, counted from 0, whose outputs requests may ask for as layers.N; see docs/tensors.md."""


@dataclass(frozen=True)
class TensorOptions(OutputLayers):
    """Tensors for clients"""

    output_tensors: dict[str, str] = field(default_factory=dict)
    """Tensors that requests may ask for beside logits and hidden_states, each made by a function of yours, such as
    {mean: my_module:mean}; see docs/tensors.md."""
    tensor_buffer: ByteCount = 16 << 20
    """Tensors that wait to be sent to a router; sequences that ask for more wait meanwhile."""


DEBUG_INPUTS: Final = (
    "input_ids", "position_ids", "sequence_length", "host_past_key_value_lengths", "last_token_ids"
)  # fmt: skip
"""Names of TensorRT-LLM for a step's inputs."""
DEBUG_OUTPUTS: Final = ("logits",)
DEBUG_STEP: Final = "iteration_"
"""What the name of a step's folder begins with, before its number."""


@dataclass(frozen=True)
class DebugOptions:
    """Debugging"""

    debug_tensors: tuple[str, ...] = ()
    """Arrays of each step that are written to `debug_folder`: input_ids, position_ids, sequence_length,
    host_past_key_value_lengths, last_token_ids, logits; default: none. Steps take longer. See docs/tensors.md."""
    debug_folder: Annotated[str | None, NotEmpty()] = None
    """Folder for them: ENGINE/iteration_N/NAME.npy, with the engine's `id`."""
    debug_max_steps: Annotated[int, Range(ge=1, le=1 << 20)] = 1000
    """The newest steps that are kept there."""
    debug_max_size: ByteCount = 1 << 30
    """Their size; at least one step is kept."""


@dataclass(frozen=True)
class GuideLimits:
    """Guided decoding"""

    guided_compile_seconds: PositiveSeconds = 5.0
    """CPU seconds to compile a guide (a schema, an expression, a grammar); one that takes more is refused."""
    guided_mask_seconds: PositiveSeconds = 0.05
    """CPU seconds to find the tokens that a guide allows next; a sequence that takes more ends with an error."""
    guided_memory: ByteCount = 1 << 30
    """Memory of the process that follows guides, beyond its tokenizer."""


DRAFT_TOKENS = 4
"""Of a draft model, unless the setting says otherwise."""


@dataclass(frozen=True)
class LoraOptions:
    """LoRA adapters"""

    lora: bool = False
    """Serve requests that name an adapter; see docs/lora.md."""
    lora_folders: tuple[str, ...] = ()
    """Folders on this machine from which adapters may be loaded by path; default: none, adapters are uploaded."""
    lora_prefetch_dir: str | None = None
    """Folder of adapters, one per folder in it, that are loaded into host memory at the start."""
    lora_max_adapter_size: Annotated[int, Range(ge=1, le=512)] = 64
    """Largest rank of an adapter."""
    lora_optimal_adapter_size: Annotated[int, Range(ge=1, le=512)] = 8
    """Ranks in a page of memory: an adapter takes as many pages per linear map as its rank needs."""
    lora_device_cache_percent: Annotated[float, Range(gt=0, le=0.95)] = 0.02
    """Part of the device memory left after loading that adapters get, before the KV cache."""
    lora_num_device_module_layer: Annotated[int | None, Range(ge=1)] = None
    """Adapters on the device, in ranks of one linear map of one layer, in place of lora_device_cache_percent."""
    lora_host_cache_size: ByteCount = 1 << 30
    """Host memory for adapters."""
    lora_num_host_module_layer: Annotated[int | None, Range(ge=1)] = None
    """Adapters in host memory, in ranks of one linear map of one layer, in place of lora_host_cache_size."""
    lora_num_put_workers: Annotated[int, Range(ge=1, le=64)] = 1
    """Threads that read adapters from disk."""


@dataclass(frozen=True)
class ImageOptions:
    """Images"""

    image_cache_size: ByteCount = 512 << 20
    """Host memory for the embeddings of images that were computed: one of LLaVA 1.5 7B takes 9 MiB; see
    docs/images.md."""


@dataclass(frozen=True)
class Batching(SchedulerNames, PriorityAging, BatchSize):
    """Batching"""

    chunked_context: bool = True
    """Compute a long prompt in several steps, beside other sequences, instead of in one step of its own."""
    context_chunking_policy: ChunkingPolicy = "first_come_first_served"
    """How long prompts share the tokens of a step: one after the other, or evenly."""
    max_draft_tokens: Annotated[int | None, Range(ge=0, le=64)] = None
    """Tokens that are drafted per sequence and step for requests that do not say; 0: none; default: 4 with
    `draft_model`, else 0. See docs/speculation.md."""
    draft_model: Annotated[str | None, NotEmpty()] = None
    """Folder or hub id of a smaller model with the same tokenizer, whose guesses are the drafts; default: drafts are
    looked up. It has weights and KV cache of its own on the same device. See docs/speculation.md."""
    max_draft_batch: Annotated[int, Range(ge=0, le=4096)] = 8
    """Steps of more sequences have no drafts, which would slow down all of them; 0: no drafts at all."""
    block_reuse: bool = True
    """Reuse the KV cache blocks of common prompt prefixes."""
    kv_event_buffer: Annotated[int, Range(ge=0, le=1 << 20)] = 0
    """KV cache events kept for those who follow the prefix cache, each up to about a kilobyte; 0: none. See
    docs/kv_cache.md."""

    @property
    def draft_tokens(self) -> int:
        """Per sequence and step, of requests that do not say."""
        if self.max_draft_tokens is not None:
            return self.max_draft_tokens
        return 0 if self.draft_model is None else DRAFT_TOKENS

    @property
    def chunk(self) -> int | None:
        """Tokens of one sequence that a step computes at most; None: as many as it has."""
        return self.max_tokens_per_step if self.chunked_context else None


@dataclass(frozen=True)
class Parallelism:
    """Tensor parallelism"""

    tensor_parallel: Annotated[int, Range(ge=1, le=256)] = 1
    """Ranks that compute the model together: processes, each with its own GPU or on the CPU."""
    rank_timeout: PositiveSeconds = 60.0
    """Seconds without progress of a rank within a step, after which all ranks end with an error."""
    rank_start_timeout: PositiveSeconds = 600.0
    """Seconds for all ranks to load the model."""
