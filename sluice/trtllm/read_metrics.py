"""An engine's statistics of a request as TensorRT-LLM's metrics."""

from datetime import timedelta

from sluice import executor
from sluice.trtllm.metrics import (
    ZERO,
    KvCacheMetrics,
    RequestPerfMetrics,
    SpeculativeDecodingMetrics,
    TimingMetrics,
)
from sluice.trtllm.read_statistics import step_number


def read_metrics(
    stats: executor.RequestStats, arrival: float, tokens_per_block: int, num_tokens: int | None, *, is_final: bool
) -> RequestPerfMetrics:
    """`arrival`: Unix time at which the request was enqueued. `num_tokens`: tokens so far, with the response that the
    metrics are for; None: there are several outputs. Times are since 1970."""
    found = RequestPerfMetrics(_timing(stats, arrival), _kv_cache(stats, tokens_per_block), _speculation(stats))
    if stats.first_iter is not None:
        found.first_iter = step_number(stats.first_iter)
        if is_final:
            found.iter = found.last_iter = step_number(stats.iter)
        elif num_tokens is not None:
            # Between two reports each step brings a token.
            number = step_number(stats.iter) + num_tokens - stats.num_generated_tokens
            found.iter = max(found.first_iter, number)
    if not is_final:
        found.timing_metrics.last_token_time = ZERO
    return found


def _timing(stats: executor.RequestStats, arrival: float) -> TimingMetrics:
    scheduled = stats.first_scheduled
    return TimingMetrics(
        # Clocks of two processes: one of them may have been set meanwhile.
        arrival_time=_time(arrival if scheduled is None else min(arrival, scheduled)),
        first_scheduled_time=_time(scheduled),
        first_token_time=_time(stats.first_token),
        last_token_time=_time(stats.last_token),
    )


def _time(seconds: float | None) -> timedelta:
    return ZERO if seconds is None else timedelta(seconds=seconds)


def _kv_cache(stats: executor.RequestStats, tokens_per_block: int) -> KvCacheMetrics:
    """Of the prompt's blocks, the last of which may be full in part."""
    blocks, reused = (-(-tokens // tokens_per_block) for tokens in (stats.num_prompt_tokens, stats.num_cached_tokens))
    missed = blocks - reused
    return KvCacheMetrics(
        num_total_allocated_blocks=missed,
        num_new_allocated_blocks=missed,
        num_reused_blocks=reused,
        num_missed_blocks=missed,
        kv_cache_hit_rate=reused / blocks if blocks else 0.0,
    )


def _speculation(stats: executor.RequestStats) -> SpeculativeDecodingMetrics:
    drafted, accepted = stats.num_draft_tokens, stats.num_accepted_draft_tokens
    return SpeculativeDecodingMetrics(accepted / drafted if drafted else 0.0, accepted, drafted)
