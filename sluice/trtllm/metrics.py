"""Performance metrics of one request."""

from dataclasses import dataclass, field
from datetime import timedelta

ZERO = timedelta(0)


@dataclass
class TimingMetrics:
    """Times of the request's events, since 1970; zero for events that have not happened."""

    arrival_time: timedelta = ZERO
    first_scheduled_time: timedelta = ZERO
    first_token_time: timedelta = ZERO
    last_token_time: timedelta = ZERO
    kv_cache_transfer_start: timedelta = ZERO
    kv_cache_transfer_end: timedelta = ZERO
    kv_cache_size: int = 0


@dataclass
class KvCacheMetrics:
    """KV cache blocks of the request's prompt."""

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
    """Requested with `OutputConfig.return_perf_metrics`."""

    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    speculative_decoding: SpeculativeDecodingMetrics = field(default_factory=SpeculativeDecodingMetrics)
    first_iter: int | None = None
    """Number of the request's first step."""
    last_iter: int | None = None
    """Number of the request's last step; None before the end."""
    iter: int | None = None
    """Number of the step of the latest token."""
