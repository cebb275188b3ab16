"""Performance metrics of one request, translated from an engine's statistics of it."""

from dataclasses import dataclass, field
from datetime import timedelta

from sluice.executor.stats import ReportedRequest
from sluice.trtllm.statistics import step_number

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


def read_metrics(
    stats: ReportedRequest, arrival: float, tokens_per_block: int, num_tokens: int | None, *, is_final: bool
) -> RequestPerfMetrics:
    """The metrics for one response.

    `arrival`: when the request was enqueued, in seconds since 1970. `num_tokens`: tokens up to and including the
    response; None if the request has several outputs.
    """
    metrics = RequestPerfMetrics(_timing(stats, arrival), _kv_cache(stats, tokens_per_block), _speculation(stats))
    if stats.first_iter is not None:
        metrics.first_iter = step_number(stats.first_iter)
        if is_final:
            metrics.iter = metrics.last_iter = step_number(stats.iter)
        elif num_tokens is not None:
            # Assumes one token per step since the engine's latest report.
            number = step_number(stats.iter) + num_tokens - stats.num_generated_tokens
            metrics.iter = max(metrics.first_iter, number)
    if not is_final:
        metrics.timing_metrics.last_token_time = ZERO
    return metrics


def _timing(stats: ReportedRequest, arrival: float) -> TimingMetrics:
    scheduled = stats.first_scheduled
    return TimingMetrics(
        # At most the time of scheduling: the clock may have been set between the two readings.
        arrival_time=_time(arrival if scheduled is None else min(arrival, scheduled)),
        first_scheduled_time=_time(scheduled),
        first_token_time=_time(stats.first_token),
        last_token_time=_time(stats.last_token),
    )


def _time(seconds: float | None) -> timedelta:
    return ZERO if seconds is None else timedelta(seconds=seconds)


def _kv_cache(stats: ReportedRequest, tokens_per_block: int) -> KvCacheMetrics:
    """Metrics of the prompt's blocks, including a last block that is only partly filled."""
    blocks, reused = (-(-tokens // tokens_per_block) for tokens in (stats.num_prompt_tokens, stats.num_cached_tokens))
    missed = blocks - reused
    return KvCacheMetrics(
        num_total_allocated_blocks=missed,
        num_new_allocated_blocks=missed,
        num_reused_blocks=reused,
        num_missed_blocks=missed,
        kv_cache_hit_rate=reused / blocks if blocks else 0.0,
    )


def _speculation(stats: ReportedRequest) -> SpeculativeDecodingMetrics:
    drafted, accepted = stats.num_draft_tokens, stats.num_accepted_draft_tokens
    return SpeculativeDecodingMetrics(accepted / drafted if drafted else 0.0, accepted, drafted)
