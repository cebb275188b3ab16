"""The configuration of the scheduler: which requests hold KV cache memory, and which run in a step."""

from dataclasses import dataclass

from sluice.trtllm.enums import CapacitySchedulerPolicy, ContextChunkingPolicy


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
