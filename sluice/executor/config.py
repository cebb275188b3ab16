"""TensorRT-LLM's configuration classes, and the engine settings that they translate to."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    """The KV cache of each engine. None: the engine's default."""

    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = None
    """Without a GPU: of the free main memory. The smaller of this and max_tokens applies."""
    enable_block_reuse: bool = True
    host_cache_size: int | None = None
    """Bytes of main memory for evicted blocks."""
    max_attention_window: int | Sequence[int] | None = None
    """In tokens; a sequence of numbers is repeated over the layers."""
    tokens_per_block: int | None = None
    event_buffer_max_size: int = 0
    """KV cache events that each engine keeps until they are read; 0: there are none."""

    def engine_args(self) -> dict[str, Any]:
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
        return _given(settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftCacheConfig:
    """The memory of each engine for LoRA adapters. None: the engine's default."""

    max_adapter_size: int | None = None
    """Largest rank of an adapter."""
    optimal_adapter_size: int | None = None
    """Ranks in a page of memory."""
    device_cache_percent: float | None = None
    """Part of the free device memory, from 0 to 1."""
    num_device_module_layer: int | None = None
    """Instead: adapters on the device, in ranks of one linear map of one layer."""
    host_cache_size: int | None = None
    """Bytes."""
    num_host_module_layer: int | None = None
    num_put_workers: int | None = None
    """Threads that read adapters."""
    lora_prefetch_dir: str | None = None
    """Folder of adapters, one per folder in it, on the engines' machines."""

    def engine_args(self) -> dict[str, Any]:
        given = _given(asdict(self))
        return {"lora": True, **{f"lora_{name.removeprefix('lora_')}": value for name, value in given.items()}}


def adapter_args(enabled: bool, config: PeftCacheConfig | None) -> dict[str, Any]:
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
    """The scheduler of each engine. None: the engine's default. Raises TypeError for a class instead of its name.

    Policies are given as members, by value, or by TensorRT-LLM's upper-case name.
    """

    capacity_scheduler_policy: CapacitySchedulerPolicy | str | None = None
    """Or your own class, as "module:Class"."""
    context_chunking_policy: ContextChunkingPolicy | str | None = None
    micro_batch_scheduler: str | None = None
    """Your own class, as "module:Class"."""
    scheduler: str | None = None
    """Your own class, as "module:Class", which replaces all of the above."""

    def __post_init__(self) -> None:
        for name, expected in EXPECTED.items():
            if (value := getattr(self, name)) is not None:
                check_name(name, value, expected)

    def engine_args(self) -> dict[str, Any]:
        settings = {
            "capacity_scheduler_policy": _member(CapacitySchedulerPolicy, self.capacity_scheduler_policy),
            "context_chunking_policy": _member(ContextChunkingPolicy, self.context_chunking_policy),
            "micro_batch_scheduler": self.micro_batch_scheduler,
            "scheduler": self.scheduler,
        }
        return _given({name: value and str(value) for name, value in settings.items()})


def _member(policies: type[StrEnum], given: str | None) -> str | None:
    # Members are named as TensorRT-LLM's, in upper case. Other text is left to the engine: it may name a user's class.
    return policies.__members__.get(given, given) if given else None


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
