"""What an executor reports in addition to responses: statistics, performance metrics, KV cache events."""

from datetime import timedelta

import pytest

import sluice.trtllm as trtllm
from tests.fakes.processes import wait_until
from tests.trtllm.running import GREEDY, LIMIT, PROMPT, results, run

pytestmark = pytest.mark.process

Finish = trtllm.FinishReason


def test_statistics(executor) -> None:
    run(executor)
    steps, requests = [], []

    def reported() -> bool:
        steps.extend(executor.get_latest_iteration_stats())
        requests.extend(
            request for step_stats in executor.get_latest_request_stats() for request in step_stats.request_stats
        )
        return bool(steps) and any(request.stage is trtllm.RequestStage.GENERATION_COMPLETE for request in requests)

    assert wait_until(reported)
    assert steps[-1].kv_cache_stats.max_num_blocks > 0
    assert max(request.num_generated_tokens for request in requests) > 0
    assert executor.get_latest_debug_tensors() == []


METRICS = trtllm.OutputConfig(return_perf_metrics=True)


@pytest.mark.parametrize("streaming", [False, True])
def test_perf_metrics(executor, streaming) -> None:
    prompt = [3900 + streaming, 2, 3, 4]
    answers = results(executor, prompt=prompt, streaming=streaming, output_config=METRICS)
    assert len(answers) == (5 if streaming else 1)
    for number, result in enumerate(answers):
        metrics, times = result.request_perf_metrics, result.request_perf_metrics.timing_metrics
        assert timedelta(0) < times.arrival_time < times.first_scheduled_time < times.first_token_time
        cache = metrics.kv_cache_metrics
        assert (cache.num_total_allocated_blocks, cache.num_reused_blocks, cache.num_missed_blocks) == (1, 0, 1)
        if not result.is_final:
            assert (times.last_token_time, metrics.last_iter) == (timedelta(0), None)
            assert metrics.iter == metrics.first_iter + number
    assert times.first_token_time < times.last_token_time
    assert metrics.iter == metrics.last_iter == metrics.first_iter + 4
    assert answers[-1].avg_decoded_tokens_per_iter == 1
    (result,) = results(executor, prompt=prompt)
    assert (result.request_perf_metrics, result.avg_decoded_tokens_per_iter) == (None, None)


def test_perf_metrics_of_a_reused_prompt(executor) -> None:
    prompt = [3800 - i for i in range(100)]
    run(executor, prompt=prompt)
    (result,) = results(executor, prompt=[*prompt[:64], *GREEDY], output_config=METRICS)
    cache = result.request_perf_metrics.kv_cache_metrics
    assert (cache.num_new_allocated_blocks, cache.num_reused_blocks, cache.num_missed_blocks) == (1, 2, 1)
    assert cache.kv_cache_hit_rate == pytest.approx(2 / 3)


def test_perf_metrics_of_drafts(executor) -> None:
    expected = results(executor, 40)[0].output_token_ids[0][len(PROMPT) :]
    drafts = trtllm.ExternalDraftTokensConfig([*expected[:30], *(token ^ 1 for token in expected[30:])])
    speculation = trtllm.SpeculativeDecodingMetrics()

    def accepted() -> bool:
        nonlocal speculation
        (result,) = results(executor, 40, external_draft_tokens_config=drafts, output_config=METRICS)
        assert result.output_token_ids == [PROMPT + expected]
        speculation = result.request_perf_metrics.speculative_decoding
        return speculation.total_accepted_draft_tokens > 0

    # Whether a step has draft tokens depends on measured step times.
    assert wait_until(accepted)
    # Where these draft tokens are wrong, those of a lookup may be accepted.
    assert speculation.total_accepted_draft_tokens <= min(39, speculation.total_draft_tokens)
    assert speculation.acceptance_rate == speculation.total_accepted_draft_tokens / speculation.total_draft_tokens


@pytest.mark.parametrize(
    "options", [{"num_return_sequences": 2}, {"sampling_config": trtllm.SamplingConfig(2)}], ids=str
)
def test_perf_metrics_of_several_outputs(executor, options) -> None:
    *_, last = results(executor, output_config=METRICS, **options)
    assert last.is_final
    assert last.request_perf_metrics.last_iter > last.request_perf_metrics.first_iter


def test_perf_metrics_of_a_request_that_is_cancelled(executor) -> None:
    request_id = executor.enqueue_request(
        trtllm.Request(PROMPT, 2000, streaming=True, output_config=METRICS, logits_post_processor_name="slow")
    )
    (first, *_) = executor.await_responses(request_id, LIMIT)
    assert first.result.request_perf_metrics.last_iter is None
    executor.cancel_request(request_id)
    result = first.result
    while not result.is_final:
        result = executor.await_responses(request_id, LIMIT)[-1].result
    assert result.finish_reasons == [Finish.CANCELLED]
    assert result.request_perf_metrics.last_iter > result.request_perf_metrics.first_iter


def test_kv_cache_events(executor) -> None:
    prompt = list(range(3000, 3070))
    run(executor, prompt=prompt)
    manager = executor.get_kv_cache_event_manager()
    events, stored = [], []
    while len(stored) < 2:
        received = manager.get_latest_events(LIMIT)
        assert received
        events += received
        stored = [event.data for event in events if isinstance(event.data, trtllm.KVCacheStoredData)]
        stored = [data for data in stored if data.blocks[0].tokens[0].token_id in prompt]
    stored = stored[:2]
    first, second = stored
    tokens = [token.token_id for data in stored for token in data.blocks[0].tokens]
    size = len(tokens) // 2
    assert tokens == prompt[: 2 * size]
    assert (first.parent_hash, second.parent_hash) == (None, first.blocks[0].block_hash)
    assert (first.blocks[0].cache_level, first.blocks[0].priority, first.blocks[0].lora_id) == (0, 35, None)
    assert [event.event_id for event in events] == list(range(len(events)))
    assert isinstance(events[0].data, trtllm.KVCacheCreatedData)
    assert isinstance(events[0].data, trtllm.kv_cache.KVCacheCreatedData)
    assert events[0].data.num_blocks_per_cache_level == (8192 // size, 0)
    assert manager.get_latest_events(1) == []
