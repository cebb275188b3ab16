"""The statistics of a request's result: how the result waits for them, and how it ends without them."""

import asyncio

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.executor import GenerationExecutor
from sluice.executor.call import StatsWatch, has_ended, has_token
from sluice.v1 import admin_pb2 as pb
from tests.fakes.processes import wait_until

QUEUED = pb.RequestStats(stage=pb.REQUEST_STAGE_QUEUED)
STARTED = pb.RequestStats(stage=pb.REQUEST_STAGE_GENERATION, first_token=Timestamp(seconds=1))
ENDED = pb.RequestStats(stage=pb.REQUEST_STAGE_ENDED, first_token=Timestamp(seconds=1), generated_tokens=4)


@pytest.mark.parametrize(("reached", "expected"), [(has_token, STARTED), (has_ended, ENDED)])
async def test_waits_until_the_statistics_satisfy_the_predicate(reached, expected):
    watch = StatsWatch()
    waiting = asyncio.ensure_future(watch.wait(reached))
    for stats in (QUEUED, STARTED, ENDED):
        watch.put(stats)
        await asyncio.sleep(0.01)
        assert waiting.done() == (stats is ENDED or stats is expected)
    assert waiting.result() is expected


async def test_statistics_that_already_satisfy_the_predicate(monkeypatch):
    monkeypatch.setattr("sluice.executor.call.REPORT_SECONDS", 0.0)
    watch = StatsWatch()
    assert await watch.wait(has_ended) is None
    watch.put(STARTED)
    assert await watch.wait(has_ended) is STARTED


def test_a_request_ends_without_statistics_if_its_engine_reports_none(address, monkeypatch):
    monkeypatch.setattr("sluice.executor.call.REPORT_SECONDS", 0.1)
    with GenerationExecutor.connect(address) as executor:
        for streaming in (False, True):
            result = executor.generate_async("x", streaming=streaming, return_perf_metrics=True).result(60)
            assert result.outputs[0].token_ids
            assert result.stats is None


def test_an_abort_after_the_response_has_no_effect(address, monkeypatch):
    monkeypatch.setattr("sluice.executor.call.REPORT_SECONDS", 120.0)
    with GenerationExecutor.connect(address) as executor:
        session = executor._session
        result = executor.generate_async("x", return_perf_metrics=True)
        assert wait_until(lambda: any(call.answered for call in list(session._calls.values())))
        (call,) = session._calls.values()
        num_tasks = len(session._background)
        result.abort()
        # The event loop starts the abort before it runs this call. The abort has ended once its task is removed.
        session.run(lambda _: asyncio.sleep(0))
        assert wait_until(lambda: len(session._background) == num_tasks)
        session._loop.call_soon_threadsafe(call.stats.put, ENDED)
        assert result.result(60).outputs[0].finish_reason == "stop"


def test_an_executor_without_statistics(address):
    with GenerationExecutor.connect(address, iter_stats_max_iterations=0) as executor:
        with pytest.raises(ValueError, match="iter_stats_max_iterations"):
            executor.generate_async("x", return_perf_metrics=True)
        executor.generate("x")
