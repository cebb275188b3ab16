"""TensorRT-LLM's performance metrics, read from an engine's statistics of a request."""

from datetime import timedelta

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.executor.stats import read_request
from sluice.trtllm.statistics import read_metrics
from sluice.v1 import admin_pb2 as pb

BLOCK = 32
STATS = {
    "stage": pb.REQUEST_STAGE_ENDED,
    "first_scheduled": Timestamp(seconds=10),
    "first_token": Timestamp(seconds=11),
    "last_token": Timestamp(seconds=14),
    "prompt_tokens": 4,
    "generated_tokens": 5,
    "first_iteration": 8,
    "iteration": 12,
}


def metrics(num_tokens=5, is_final=True, arrival=9.5, **changed):
    stats = read_request(pb.RequestStats(**STATS | changed), 1)
    return read_metrics(stats, arrival, BLOCK, num_tokens, is_final=is_final)


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


def test_times() -> None:
    times = metrics().timing_metrics
    assert (times.arrival_time, times.first_scheduled_time) == (seconds(9.5), seconds(10))
    assert (times.first_token_time, times.last_token_time) == (seconds(11), seconds(14))
    assert metrics(arrival=10.5).timing_metrics.arrival_time == seconds(10)


def test_steps_are_counted_from_0() -> None:
    counted = metrics()
    assert (counted.first_iter, counted.iter, counted.last_iter) == (7, 11, 11)


@pytest.mark.parametrize("reported", [1, 3, 5])
def test_within_a_stream(reported) -> None:
    """The result does not depend on how many tokens the engine had reported when the response was read."""
    report = {"stage": pb.REQUEST_STAGE_GENERATION, "generated_tokens": reported, "iteration": 7 + reported}
    for num_tokens in range(1, 5):
        partial = metrics(num_tokens, is_final=False, **report)
        assert (partial.first_iter, partial.iter, partial.last_iter) == (7, 6 + num_tokens, None)
        assert partial.timing_metrics.last_token_time == seconds(0)
        assert partial.timing_metrics.first_token_time == seconds(11)
    assert metrics(None, is_final=False, **report).iter is None


def test_a_request_that_never_ran() -> None:
    stats = read_request(pb.RequestStats(stage=pb.REQUEST_STAGE_ENDED, prompt_tokens=4, iteration=3), 1)
    unrun = read_metrics(stats, 9.5, BLOCK, 0, is_final=True)
    assert (unrun.first_iter, unrun.iter, unrun.last_iter) == (None, None, None)
    assert (unrun.timing_metrics.arrival_time, unrun.timing_metrics.first_token_time) == (seconds(9.5), seconds(0))


@pytest.mark.parametrize(
    ("prompt", "cached", "reused", "missed", "rate"),
    [(4, 0, 0, 1, 0.0), (40, 35, 2, 0, 1.0), (64, 32, 1, 1, 0.5), (33, 0, 0, 2, 0.0)],
)
def test_blocks_of_the_prompt(prompt, cached, reused, missed, rate) -> None:
    cache = metrics(prompt_tokens=prompt, cached_tokens=cached).kv_cache_metrics
    assert (cache.num_reused_blocks, cache.num_missed_blocks, cache.kv_cache_hit_rate) == (reused, missed, rate)
    assert cache.num_total_allocated_blocks == cache.num_new_allocated_blocks == missed


def test_drafts() -> None:
    speculation = metrics(draft_tokens=4, accepted_draft_tokens=2).speculative_decoding
    assert (speculation.acceptance_rate, speculation.total_accepted_draft_tokens, speculation.total_draft_tokens) == (
        0.5,
        2,
        4,
    )
    assert metrics().speculative_decoding.acceptance_rate == 0
