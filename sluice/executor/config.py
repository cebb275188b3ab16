"""TensorRT-LLM's configuration classes, and their translation to engine settings."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from sluice.executor.errors import check_name


class CapacitySchedulerPolicy(StrEnum):
    """Which requests may hold KV cache memory."""

    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    STATIC_BATCH = "static_batch"


class ContextChunkingPolicy(StrEnum):
    """How a step's context tokens are divided among prompts."""

    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    """The KV cache of each engine. Fields that are None have the engine's default."""

    max_tokens: int | None = None
    """Capacity in tokens. If `free_gpu_memory_fraction` is given too, the smaller capacity applies."""
    free_gpu_memory_fraction: float | None = None
    """Fraction of the free GPU memory, or of the free main memory on machines without a GPU, in (0, 1)."""
    enable_block_reuse: bool = True
    """Whether requests share the blocks of common prompt prefixes."""
    host_cache_size: int | None = None
    """Main memory for blocks evicted from the device, in bytes."""
    max_attention_window: int | Sequence[int] | None = None
    """Attention window in tokens; a sequence has one window per layer and is repeated over the layers."""
    tokens_per_block: int | None = None
    event_buffer_max_size: int = 0
    """KV cache events that each engine buffers until they are read; 0: no events are recorded."""

    def engine_args(self) -> dict[str, Any]:
        """The engine settings of the fields that are set."""
        window = self.max_attention_window
        settings = {
            "kv_cache_tokens": self.max_tokens,
            "kv_memory_fraction": self.free_gpu_memory_fraction,
            "block_reuse": None if self.enable_block_reuse else False,
            "kv_host_memory": self.host_cache_size,
            "max_attention_window": window if window is None or isinstance(window, int) else tuple(window),
            "tokens_per_block": self.tokens_per_block,
            "kv_event_buffer": self.event_buffer_max_size or None,
        }
        return _without_none(settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftCacheConfig:
    """The memory of each engine for LoRA adapters, with TensorRT-LLM's defaults; None is the default too."""

    max_adapter_size: int | None = 64
    """Largest rank of an adapter."""
    optimal_adapter_size: int | None = 8
    """Ranks per page of device memory."""
    device_cache_percent: float | None = 0.02
    """Fraction of the free device memory for adapters, from 0 to 1."""
    num_device_module_layer: int | None = 0
    """Capacity of the device cache, in ranks of one linear layer. Above 0 it replaces `device_cache_percent`."""
    host_cache_size: int | None = 1 << 30
    """Main memory for adapters, in bytes."""
    num_host_module_layer: int | None = 0
    """Capacity of the host cache, in ranks of one linear layer. Above 0 it replaces `host_cache_size`."""
    num_put_workers: int | None = 1
    """Threads that read adapter files."""
    lora_prefetch_dir: str | None = None
    """Folder on the engines' machines whose subfolders are adapters to load at the start."""

    def engine_args(self) -> dict[str, Any]:
        """The engine settings of the fields that are set, and the setting that enables adapters."""
        defaults = {field.name: field.default for field in fields(self)}
        settings = {name: value for name, value in asdict(self).items() if value not in (None, defaults[name])}
        return {"lora": True, **{f"lora_{name.removeprefix('lora_')}": value for name, value in settings.items()}}


def adapter_args(enabled: bool, config: PeftCacheConfig | None) -> dict[str, Any]:
    """The engine settings for LoRA adapters: none, unless `enabled` or with a `config`."""
    if config is None and not enabled:
        return {}
    return (config or PeftCacheConfig()).engine_args()


A_CLASS = 'the name of your class as "module:Class"'
EXPECTED = {
    "capacity_scheduler_policy": f"a CapacitySchedulerPolicy or {A_CLASS}",
    "context_chunking_policy": "a ContextChunkingPolicy",
    "micro_batch_scheduler": A_CLASS,
    "scheduler": A_CLASS,
}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler of each engine. Fields that are None have the engine's default.

    A policy is a member of its enum, the member's value, or TensorRT-LLM's upper-case name of it. Raises TypeError for
    a class in place of its name.
    """

    capacity_scheduler_policy: CapacitySchedulerPolicy | str | None = None
    """Which requests may hold KV cache memory: a policy, or the name of your own class as "module:Class"."""
    context_chunking_policy: ContextChunkingPolicy | str | None = None
    micro_batch_scheduler: str | None = None
    """Which requests run in a step: the name of your own class as "module:Class"."""
    scheduler: str | None = None
    """The name of your own class as "module:Class", which replaces all of the above."""

    def __post_init__(self) -> None:
        for name, expected in EXPECTED.items():
            if (value := getattr(self, name)) is not None:
                check_name(name, value, expected)

    def engine_args(self) -> dict[str, Any]:
        """The engine settings of the fields that are set."""
        settings = {
            "capacity_scheduler_policy": _member(CapacitySchedulerPolicy, self.capacity_scheduler_policy),
            "context_chunking_policy": _member(ContextChunkingPolicy, self.context_chunking_policy),
            "micro_batch_scheduler": self.micro_batch_scheduler,
            "scheduler": self.scheduler,
        }
        return _without_none({name: value and str(value) for name, value in settings.items()})


def _member(policies: type[StrEnum], name: str | None) -> str | None:
    # Members have TensorRT-LLM's upper-case names. Any other text goes to the engine: it may name a user's class.
    return policies.__members__.get(name, name) if name else None


def _without_none(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
