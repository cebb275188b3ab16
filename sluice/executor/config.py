"""TensorRT-LLM's configuration classes, and the settings of an engine that they become."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sluice.executor.names import check_name


class CapacitySchedulerPolicy(StrEnum):
    """Who may hold KV cache memory."""

    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    STATIC_BATCH = "static_batch"


class ContextChunkingPolicy(StrEnum):
    """How a step's tokens are dealt out to prompts."""

    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    """The KV cache of each engine. Unset: the engine's default."""

    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = None
    """On a machine without a GPU, of its free main memory. With max_tokens, the lesser counts."""
    enable_block_reuse: bool = True
    host_cache_size: int | None = None
    """Bytes of main memory for evicted blocks."""
    max_attention_window: int | Sequence[int] | None = None
    """Tokens that a token sees; several numbers are repeated over the layers."""
    tokens_per_block: int | None = None

    def engine_args(self) -> dict[str, Any]:
        """As settings of `engine_worker`."""
        window = self.max_attention_window
        settings = {
            "kv_cache_tokens": self.max_tokens,
            "kv_memory_fraction": self.free_gpu_memory_fraction,
            "block_reuse": None if self.enable_block_reuse else False,
            "kv_host_memory": self.host_cache_size,
            "max_attention_window": window if window is None or isinstance(window, int) else tuple(window),
            "tokens_per_block": self.tokens_per_block,
        }
        return _given(settings)


A_CLASS = 'the name of a class of yours as "module:Class"'
EXPECTED = {
    "capacity_scheduler_policy": f"a CapacitySchedulerPolicy or {A_CLASS}",
    "context_chunking_policy": "a ContextChunkingPolicy",
    "micro_batch_scheduler": A_CLASS,
    "scheduler": A_CLASS,
}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler of each engine. Unset: the engine's default.

    Policies may be given as members, by value or by TensorRT-LLM's name in capitals. Raises TypeError for a class
    instead of its name.
    """

    capacity_scheduler_policy: CapacitySchedulerPolicy | str | None = None
    """Also a class of your own, as "module:Class"."""
    context_chunking_policy: ContextChunkingPolicy | str | None = None
    micro_batch_scheduler: str | None = None
    """A class of your own, as "module:Class"."""
    scheduler: str | None = None
    """The same, in one piece, instead of all others."""

    def __post_init__(self) -> None:
        for name, expected in EXPECTED.items():
            if (value := getattr(self, name)) is not None:
                check_name(name, value, expected)

    def engine_args(self) -> dict[str, Any]:
        """As settings of `engine_worker`."""
        settings = {
            "capacity_scheduler_policy": _member(CapacitySchedulerPolicy, self.capacity_scheduler_policy),
            "context_chunking_policy": _member(ContextChunkingPolicy, self.context_chunking_policy),
            "micro_batch_scheduler": self.micro_batch_scheduler,
            "scheduler": self.scheduler,
        }
        return _given({name: value and str(value) for name, value in settings.items()})


def _member(policies: type[StrEnum], given: str | None) -> str | None:
    """TensorRT-LLM writes its policies in capitals, as the members here are named."""
    return policies.__members__.get(given, given) if given else None


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
