"""Measurements of one request."""

from dataclasses import dataclass, field
from datetime import timedelta

ZERO = timedelta(0)


@dataclass
class TimingMetrics:
    arrival_time: timedelta = ZERO
    first_scheduled_time: timedelta = ZERO
    first_token_time: timedelta = ZERO
    last_token_time: timedelta = ZERO
    kv_cache_transfer_start: timedelta = ZERO
    kv_cache_transfer_end: timedelta = ZERO
    kv_cache_size: int = 0


@dataclass
class KvCacheMetrics:
    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0
    kv_cache_hit_rate: float = 0.0


@dataclass
class SpeculativeDecodingMetrics:
    acceptance_rate: float = 0.0
    total_accepted_draft_tokens: int = 0
    total_draft_tokens: int = 0


@dataclass
class RequestPerfMetrics:
    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    speculative_decoding: SpeculativeDecodingMetrics = field(default_factory=SpeculativeDecodingMetrics)
    first_iter: int | None = None
    last_iter: int | None = None
    iter: int | None = None
