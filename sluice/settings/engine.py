"""Sections of the engine's settings. A component of the engine receives whole sections."""

from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, get_args

from sluice.settings.fields import (
    ADVANCED,
    LAUNCHER,
    ByteCount,
    NotEmpty,
    PositiveInt,
    PositiveSeconds,
    PriorityAging,
    Range,
)

ChunkingPolicy = Literal["first_come_first_served", "equal_progress"]
CapacityPolicy = Literal["max_utilization", "guaranteed_no_evict", "static_batch"]
RecomputeMode = Literal["auto", "exact", "fast"]
CAPACITY_POLICIES: tuple[CapacityPolicy, ...] = get_args(CapacityPolicy)

ThreadCount = Annotated[int, Range(ge=0, le=1024)]
EngineCount = Annotated[int, Range(ge=1, le=4096), LAUNCHER]


@dataclass(frozen=True)
class BatchSize:
    """Batch size"""

    max_batch_size: Annotated[int, Range(ge=1, le=4096)] = 64
    """Maximum number of sequences in a step, and of sequences that hold KV cache blocks."""
    max_tokens_per_step: Annotated[int, Range(ge=1, le=1 << 20)] = 512
    """Maximum number of tokens that a step computes, prompt tokens included. Must be at least max_batch_size."""


@dataclass(frozen=True)
class Compute:
    """Model execution"""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that runs the model. auto: a GPU if one is available, otherwise the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights, activations and KV cache. auto: float32 on a CPU, the checkpoint's dtype on a GPU. A CPU
    with native bfloat16 instructions can also use bfloat16, with backend = openvino. float16 needs a GPU."""
    backend: Literal["auto", "openvino", "torch"] = "auto"
    """Library that computes the model. auto: OpenVINO on a CPU if it supports the model, otherwise torch. See
    docs/models.md."""
    quantize: Literal["none", "int8", "int4", "fp8"] = "none"
    """Quantization of the weights; needs backend = openvino, or a GPU. int8 is faster and takes less memory, int4 takes
    the least memory and loses the most accuracy; fp8 needs a GPU. See docs/operations.md for the loss, and
    docs/gpu.md."""
    quantized_activations: bool = True
    """On OpenVINO, let products with quantized weights round their other operand to 8 bits too. false: exact, and about
    half as fast."""
    weights_folder: str | None = None
    """Folder in which the OpenVINO backend stores the weights as a memory-mapped file, so that they occupy memory once
    instead of twice. Default: no file. See docs/operations.md."""
    kv_precision: Literal["auto", "float32", "bfloat16", "float16", "u8"] = "auto"
    """Data type of the KV cache; needs backend = openvino. auto: the same as `dtype`. bfloat16 needs dtype =
    bfloat16."""
    attention: Literal["auto", "flash", "varlen", "triton", "reference", "cpu"] = "auto"
    """Attention backend. auto: the best one that this device and these settings support. See docs/gpu.md."""
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """random: initialize the weights randomly, to benchmark a model's architecture without its weights."""
    threads: ThreadCount = 0
    """CPU threads that compute a step. 0: one less than the cores available to this process; under `sluice serve`, an
    equal share of them for each engine."""
    default_threads: Annotated[ThreadCount, LAUNCHER] = 0
    """CPU threads that compute a step if `threads` is 0."""
    max_attention_window: tuple[PositiveInt, ...] = ()
    """Number of most recent tokens that each token attends to: one number for all layers, or a list that repeats over
    the layers. The model's own sliding window still applies. Default: no limit."""
    overlap: bool | None = None
    """Schedule the next step while the current one is being computed. Default: true on a GPU, false on a CPU."""
    cuda_graphs: bool = True
    """On a GPU, launch the kernels of most steps as one CUDA graph. Capturing the graphs costs memory, and seconds at
    startup."""
    fused_kernels: bool = True
    """On a GPU, use Sluice's Triton kernels in layers, in sampling and for KV cache writes. Attention kernels are
    chosen by `attention`."""

    @property
    def step_threads(self) -> int | None:
        """CPU threads that compute a step. None: derived from the number of cores."""
        return self.threads or self.default_threads or None


OPENVINO_BLOCK: Final = 32
"""Block size of OpenVINO's attention, the only one that its CPU plugin supports."""
SMALLEST_BLOCK: Final = 16
"""Smallest block size that other attention backends choose by themselves. Small blocks waste little memory at a
sequence's end, and let requests share more of a common prefix."""


# The launcher checks this before it starts a process; the engine checks it again when it knows its device.
def requires_openvino(config: Compute, device: str) -> str | None:
    """The setting that requires OpenVINO, as `name = value`; None if no setting does. `device`: cpu, cuda, or auto if
    it is not known. Raises ValueError if settings contradict each other."""
    if config.quantize == "fp8" and device == "cpu":
        raise ValueError("quantize = fp8 needs a GPU")
    # Products with quantized matrices on a GPU are Sluice's own.
    rounded = "none" if config.quantize == "fp8" or device == "cuda" else config.quantize
    required_by = [
        f"{name} = {value}"
        for name, value, off in (
            ("quantize", rounded, "none"),
            ("kv_precision", config.kv_precision, "auto"),
            ("weights_folder", config.weights_folder, None),
        )
        if value != off
    ]
    if config.dtype == "bfloat16" and config.backend != "torch" and device == "cpu":
        required_by.append("dtype = bfloat16")
    if config.backend == "openvino":
        return "backend = openvino"
    if config.backend == "torch" and required_by:
        raise ValueError(f"{required_by[0]} needs backend = openvino, not torch")
    return required_by[0] if required_by else None


def unsupported_by_openvino(
    config: Compute, device: str, *, tokens_per_block: int, ranks: int
) -> list[tuple[str, str]]:
    """Settings, as `name = value`, that OpenVINO does not support, each with the reason. `device`: see
    `requires_openvino`."""
    return [
        (f"{name} = {value}", reason)
        for name, value, supported, reason in (
            ("tensor_parallel", ranks, ranks == 1, "runs in one process"),
            ("device", device, device != "cuda", "computes on a CPU"),
            ("dtype", config.dtype, config.dtype != "float16", "computes in float32 or bfloat16"),
            ("quantize", config.quantize, config.quantize != "fp8", "has int8 and int4"),
            ("attention", config.attention, config.attention == "auto", "has its own attention"),
            (
                "tokens_per_block",
                tokens_per_block,
                tokens_per_block in (0, OPENVINO_BLOCK),
                f"has blocks of {OPENVINO_BLOCK} tokens",
            ),
        )
        if not supported
    ]


PRIVATE_MEMORY: Final = "none"
"""The `kv_folder` with which the KV cache is no file."""


@dataclass(frozen=True)
class KvCacheSize:
    """KV cache"""

    tokens_per_block: Annotated[int, Range(ge=0, le=1024)] = 0
    """Tokens per KV cache block. 0: 16, or the size that the backend requires (32 for OpenVINO)."""
    kv_cache_tokens: Annotated[int | None, Range(ge=1)] = None
    """Size of the KV cache in tokens. Default: determined by kv_memory_fraction. If both are set, the smaller size
    applies."""
    kv_memory_fraction: Annotated[float | None, Range(gt=0, le=0.95)] = None
    """Fraction of the memory that is free after loading the model to use for the KV cache. Default, without
    kv_cache_tokens: 0.9 on a GPU, 0.5 on a CPU, divided equally among the engines of one `sluice serve`."""
    kv_host_memory: ByteCount = 0
    """Host memory to keep blocks in that are evicted from the device's KV cache, such as 8GiB. 0: evicted blocks are
    discarded."""
    kv_folder: Annotated[str | None, NotEmpty()] = None
    """Folder in memory, below /dev/shm, in which the KV cache is a file, so that it outlives the engine: the next
    engine takes it over, and other engines of this machine copy blocks from it. none: private memory. Default: a folder
    of the ring under `sluice serve` if /dev/shm has room, otherwise none. See docs/kv_cache.md."""
    default_kv_folder: Annotated[str | None, NotEmpty(), LAUNCHER] = None
    """The same if `kv_folder` is not set. An engine that cannot use it has private memory."""
    kv_fetch: bool = True
    """With `kv_folder`, copy blocks that other engines of this machine have computed, instead of computing them again.
    """
    kv_keeper: Annotated[str | None, NotEmpty()] = None
    """Address of this machine's keeper, as engines of other machines reach it, such as tcp://10.0.0.7:5900: it hands
    out the blocks in `kv_folder`. Engines with this setting ask the keepers of other machines, too. See
    docs/kv_cache.md."""
    phase: Literal["both", "prefill", "decode"] = "both"
    """Part of a request that this engine computes, if the router finds engines for both: prefill computes the prompt
    and the first token, decode everything after it. See docs/kv_cache.md."""
    engines_here: EngineCount = 1
    """Number of engines that share the memory of this machine."""
    engines_per_gpu: EngineCount = 1
    """Number of engines that share each GPU of this engine."""

    @property
    def pool_folder(self) -> str | None:
        """Folder for the file of the KV cache. None: private memory."""
        folder = self.kv_folder or self.default_kv_folder
        return None if folder == PRIVATE_MEMORY else folder

    @property
    def needs_pool_folder(self) -> bool:
        """Whether the user chose `pool_folder`: an engine that cannot use it then does not start."""
        return self.pool_folder is not None and self.kv_folder is not None


@dataclass(frozen=True)
class SchedulerNames:
    """Scheduler"""

    capacity_scheduler_policy: str = "max_utilization"
    """Policy that decides which requests may hold KV cache blocks: max_utilization, guaranteed_no_evict, static_batch,
    or your own class as module:Class. See docs/scheduling.md."""
    micro_batch_scheduler: str | None = None
    """Your own class, as module:Class, that decides which of these requests run in a step. Default: all that fit."""
    scheduler: str | None = None
    """Your own RequestScheduler class, as module:Class, that replaces both of the above."""


RESERVED_TENSORS: Final = frozenset({"logits", "context_logits", "generation_logits", "hidden_states"})
"""Names of the tensors that every engine provides."""
BATCHED: Final = "batched"
"""The name by which requests refer to the batched logits processor."""


@dataclass(frozen=True)
class ProcessorNames:
    """Logits processors"""

    logits_processors: dict[str, str] = field(default_factory=dict)
    """Logits processors that requests can refer to by name. Each is a function, such as {"upper":
    "my_module:upper_only"}, or the ipc:// address of a program on this machine. See docs/processors.md."""
    logits_processor_batched: str | None = None
    """Function, as module:function, that processes the logits of all sequences that request the processor "batched" in
    one call."""
    logits_processor_replicate: Annotated[bool, ADVANCED] = False
    """With tensor parallelism, call logits processors on every rank with the same arguments. Only the result of rank 0
    is used."""
    logits_processor_timeout: PositiveSeconds = 10.0
    """Seconds that a call of a logits processor in another program may take before its sequences end with an error.
    Must be less than the router's stall_timeout."""

    @property
    def processor_names(self) -> list[str]:
        """Names of the logits processors that requests can refer to."""
        return [*self.logits_processors, *([] if self.logits_processor_batched is None else [BATCHED])]


@dataclass(frozen=True)
class OutputLayers:
    """Layer outputs"""

    output_layers: tuple[Annotated[int, Range(ge=0, le=4095)], ...] = ()
    """Indices, from 0, of the layers whose outputs requests may ask for as layers.N. See docs/tensors.md."""


@dataclass(frozen=True)
class TensorOptions(OutputLayers):
    """Tensors for clients"""

    output_tensors: dict[str, str] = field(default_factory=dict)
    """Additional tensors that requests may ask for, besides logits and hidden_states. Each is computed by your
    function, such as {"mean": "my_module:mean"}. See docs/tensors.md."""
    tensor_buffer: ByteCount = 16 << 20
    """Maximum size of the tensors that wait to be sent to one router. Sequences whose tensors do not fit pause until
    there is room."""


DEBUG_INPUTS: Final = (
    "input_ids", "position_ids", "sequence_length", "host_past_key_value_lengths", "last_token_ids"
)  # fmt: skip
"""TensorRT-LLM's names for the inputs of a step."""
DEBUG_OUTPUTS: Final = ("logits",)
DEBUG_STEP: Final = "iteration_"
"""Prefix of the name of a step's folder. The number of the step follows it."""


@dataclass(frozen=True)
class DebugOptions:
    """Debugging"""

    debug_tensors: Annotated[tuple[str, ...], ADVANCED] = ()
    """Arrays of each step to write to `debug_folder`: any of input_ids, position_ids, sequence_length,
    host_past_key_value_lengths, last_token_ids, logits. Makes steps slower. See docs/tensors.md."""
    debug_folder: Annotated[str | None, NotEmpty(), ADVANCED] = None
    """Folder for the arrays of debug_tensors, which are written to ID/iteration_N/NAME.npy, where ID is the engine's
    `id`."""
    debug_max_steps: Annotated[int, Range(ge=1, le=1 << 20), ADVANCED] = 1000
    """Number of steps to keep in debug_folder. Older steps are deleted."""
    debug_max_size: Annotated[ByteCount, ADVANCED] = 1 << 30
    """Maximum size of all steps in debug_folder. Older steps are deleted; the newest one is always kept."""


@dataclass(frozen=True)
class GuideLimits:
    """Guided decoding"""

    guided_compile_seconds: PositiveSeconds = 5.0
    """Maximum CPU time to compile a guide (JSON schema, regular expression or grammar). A request whose guide takes
    longer is refused."""
    guided_mask_seconds: PositiveSeconds = 0.05
    """Maximum CPU time to compute which tokens a guide allows next. A sequence that takes longer ends with an error."""
    guided_memory: ByteCount = 1 << 30
    """Maximum memory of the process that evaluates guides, in addition to the memory of its tokenizer."""
    guided_closed_objects: bool = False
    """Objects of JSON schemas that list their properties have no others, unless the schema has additionalProperties.
    The standard permits others. Set it equally on all engines of a ring."""


DRAFT_TOKENS = 4
"""Draft tokens per sequence and step with a draft model, if max_draft_tokens is not set."""


@dataclass(frozen=True)
class LoraOptions:
    """LoRA adapters"""

    lora: bool = False
    """Serve requests that name a LoRA adapter. See docs/lora.md."""
    lora_folders: tuple[str, ...] = ()
    """Folders on this machine from which adapters may be loaded by path. Default: adapters can only be uploaded."""
    lora_prefetch_dir: str | None = None
    """Folder whose subfolders are adapters to load into host memory at startup."""
    lora_max_adapter_size: Annotated[int, Range(ge=1, le=512)] = 64
    """Maximum rank of an adapter."""
    lora_optimal_adapter_size: Annotated[int, Range(ge=1, le=512), ADVANCED] = 8
    """Ranks per page of adapter memory. An adapter occupies as many pages per linear layer as its rank requires."""
    lora_device_cache_percent: Annotated[float, Range(gt=0, le=0.95)] = 0.02
    """Fraction, not percentage, of the device memory that is free after loading the model to reserve for adapters. The
    KV cache is sized afterwards."""
    lora_num_device_module_layer: Annotated[int | None, Range(ge=1), ADVANCED] = None
    """Size of the adapter cache on the device, counted in ranks of one linear map of one layer. Replaces
    lora_device_cache_percent."""
    lora_host_cache_size: ByteCount = 1 << 30
    """Host memory for adapters."""
    lora_num_host_module_layer: Annotated[int | None, Range(ge=1), ADVANCED] = None
    """Size of the adapter cache in host memory, counted in ranks of one linear map of one layer. Replaces
    lora_host_cache_size."""
    lora_num_put_workers: Annotated[int, Range(ge=1, le=64), ADVANCED] = 1
    """Threads that read adapters from disk."""


@dataclass(frozen=True)
class ImageOptions:
    """Images"""

    image_cache_size: ByteCount = 512 << 20
    """Host memory for a cache of computed image embeddings. One image takes 9 MiB with LLaVA 1.5 7B. See
    docs/images.md."""


@dataclass(frozen=True)
class Batching(SchedulerNames, PriorityAging, BatchSize):
    """Batching"""

    chunked_context: bool = True
    """Compute a long prompt in chunks over several steps, together with other sequences, instead of all in one step."""
    context_chunking_policy: ChunkingPolicy = "first_come_first_served"
    """How long prompts share the tokens of a step. first_come_first_served: one prompt after another. equal_progress:
    evenly."""
    max_draft_tokens: Annotated[int | None, Range(ge=0, le=64)] = None
    """Draft tokens per sequence and step for requests that do not set a number. 0: no speculation. Default: 4 with
    `draft_model`, otherwise 0. See docs/speculation.md."""
    draft_model: Annotated[str | None, NotEmpty()] = None
    """Folder or Hugging Face id of a smaller model with the same tokenizer that proposes draft tokens. Its weights and
    KV cache are on the same device. Default: draft tokens are looked up in prompt and output. See
    docs/speculation.md."""
    max_draft_batch: Annotated[int, Range(ge=0, le=4096)] = 8
    """Largest number of sequences in a step with draft tokens. Larger steps have none, because verifying them would
    slow down every sequence. 0: no speculation."""
    recompute: RecomputeMode = "auto"
    """How to compute generated tokens again whose keys and values are gone, as after the death of another engine.
    exact: with the same bits as when they were generated, so that the stream continues with the same text. fast: like
    a prompt, which may change the last bits, and with them later tokens. auto: exact with backend = openvino, otherwise
    fast. See docs/operations.md."""
    block_reuse: bool = True
    """Reuse the KV cache blocks of common prompt prefixes."""
    kv_event_buffer: Annotated[int, Range(ge=0, le=1 << 20)] = 0
    """Number of KV cache events kept for readers of the event stream, about 1 KB each at most. 0: no events. See
    docs/kv_cache.md."""

    @property
    def draft_tokens(self) -> int:
        """Draft tokens per sequence and step for requests that do not set a number."""
        if self.max_draft_tokens is not None:
            return self.max_draft_tokens
        return 0 if self.draft_model is None else DRAFT_TOKENS

    @property
    def chunk(self) -> int | None:
        """Maximum number of tokens of one sequence that a step computes. None: no limit."""
        return self.max_tokens_per_step if self.chunked_context else None


@dataclass(frozen=True)
class Parallelism:
    """Tensor parallelism"""

    tensor_parallel: Annotated[int, Range(ge=1, le=256)] = 1
    """Number of ranks that compute the model together. Each rank is a process with one GPU, or on the CPU."""
    rank_timeout: PositiveSeconds = 60.0
    """Seconds that a rank may make no progress within a step before all ranks exit with an error."""
    rank_start_timeout: PositiveSeconds = 600.0
    """Seconds that the ranks have to load the model."""
