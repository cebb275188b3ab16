"""Waits: how shutdown ends them, their timeouts, and a request's allotted time while it waits in the executor."""

import threading
import time
from datetime import timedelta

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc import StatusCode

from sluice.executor import GenerationExecutor, SamplingParams
from sluice.executor.waiting import in_seconds
from sluice.v1 import admin_pb2 as pb
from tests.fakes.failures import Failure
from tests.fakes.processes import wait_until

LIMIT = 60
LONG = 3600


def run_in_thread(call) -> "list[BaseException | object]":
    """Run `call` in a thread. The returned list gets its result or its RuntimeError."""
    outcome: list[BaseException | object] = []

    def work() -> None:
        try:
            outcome.append(call())
        except RuntimeError as error:
            outcome.append(error)

    threading.Thread(target=work, daemon=True).start()
    return outcome


@pytest.mark.parametrize("timeout", [None, LONG])
def test_shutdown_ends_the_wait_for_responses(address, timeout) -> None:
    executor = GenerationExecutor.connect(address, iter_stats_max_iterations=0)
    ended = run_in_thread(lambda: executor.await_responses(timeout=timeout))
    time.sleep(0.05)
    executor.shutdown()
    assert wait_until(lambda: bool(ended))
    assert "shut down" in str(ended[0])


def test_unread_responses_can_be_read_after_shutdown(address, script) -> None:
    script.hangs = True
    executor = GenerationExecutor.connect(address, iter_stats_max_iterations=0)
    request_id = executor.generate_async("x").request_id
    assert wait_until(lambda: bool(script.hanging))
    executor.shutdown(abort=True)
    (response,) = executor.await_responses(timeout=LONG)
    assert (response.request_id, response.has_error()) == (request_id, True)
    with pytest.raises(RuntimeError, match="shut down"):
        executor.await_responses(timeout=LONG)


@pytest.mark.parametrize("name", ["get_latest_iteration_stats", "get_latest_request_stats"])
def test_shutdown_ends_the_wait_for_statistics(address, script, name) -> None:
    executor = GenerationExecutor.connect(address)
    read = getattr(executor, name)
    ended = run_in_thread(lambda: read(timeout=LONG))
    time.sleep(0.05)
    executor.shutdown()
    assert wait_until(lambda: bool(ended))
    assert "shut down" in str(ended[0])
    response = pb.StreamStepsResponse(steps=[pb.EngineStats(iteration=3)], requests=[pb.RequestStats(request_id="r")])
    executor._session.steps.put(response)
    assert len(read(timeout=LONG)) == 1
    with pytest.raises(RuntimeError, match="shut down"):
        read(timeout=LONG)


def test_every_timeout_may_be_a_timedelta(executor, script) -> None:
    script.hangs = True
    result = executor.generate_async("x")
    with pytest.raises(TimeoutError, match=r"within 0.05 s"):
        result.result(timedelta(milliseconds=50))
    with pytest.raises(TimeoutError, match=r"within 0.05 s"):
        result.read(timedelta(milliseconds=50))
    short = timedelta(milliseconds=1)
    assert executor.await_responses(timeout=short) == []
    assert executor.get_latest_iteration_stats(short) == executor.get_latest_request_stats(timeout=short) == []
    result.abort()
    assert result.result(timedelta(seconds=LIMIT)).done


def test_the_allotted_time_expires_while_a_request_waits_for_others(address, script) -> None:
    script.hangs = True
    with GenerationExecutor.connect(address, max_in_flight=1, iter_stats_max_iterations=0) as executor:
        first = executor.generate_async("x")
        assert wait_until(lambda: bool(script.hanging))
        second = executor.generate_async("x", SamplingParams(n=2), allotted_time_ms=timedelta(milliseconds=50))
        result = second.result(LIMIT)
        assert [output.finish_reason for output in result.outputs] == ["timeout", "timeout"]
        assert not first.done
        first.abort()
        first.result(LIMIT)
    assert len(script.hanging) == 1


def test_the_allotted_time_includes_the_wait_for_others(address, script) -> None:
    script.hangs = True
    with GenerationExecutor.connect(address, max_in_flight=1, iter_stats_max_iterations=0) as executor:
        first = executor.generate_async("x")
        assert wait_until(lambda: bool(script.hanging))
        second = executor.generate_async("y", allotted_time_ms=LONG * 1000)
        time.sleep(0.1)
        script.hangs = False
        first.abort()
        assert second.result(LIMIT).outputs[0].finish_reason == "stop"
    (time_limit,) = [
        request.spec.time_limit
        for request in script.seen
        if getattr(request, "spec", None) and request.spec.text == "y"
    ]
    assert LONG - LIMIT < time_limit.ToTimedelta().total_seconds() < LONG - 0.1


def test_the_allotted_time_includes_retries_at_an_overloaded_server(executor, script) -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=LONG))
    script.failure = Failure(StatusCode.RESOURCE_EXHAUSTED, "full", (retry,))
    (result,) = executor.generate(["x"], allotted_time_ms=100, use_tqdm=False)
    assert result.outputs[0].finish_reason == "timeout"


@pytest.mark.parametrize("allotted", [0, -5, timedelta(0)])
def test_an_invalid_allotted_time_is_sent_to_the_server(executor, script, allotted) -> None:
    executor.generate_async("x", allotted_time_ms=allotted).result(LIMIT)
    assert script.seen[-1].spec.time_limit.ToMilliseconds() == in_seconds(allotted)
