"""Many prompts: the order of results, the limit on requests in flight, progress, and failures."""

import io
import random
import sys
import threading

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from sluice.client import Overloaded
from sluice.executor import GenerationRequest, KvCacheRetentionConfig, LoRARequest, RequestError, SamplingParams
from sluice.executor.batch import BatchRun, is_batch
from tests.fakes.failures import Failure
from tests.fakes.processes import wait_until


class StubResult:
    """The result of a request that the test ends with `end`."""

    def __init__(self, request: GenerationRequest, ended) -> None:
        self.request = request
        self.end = lambda: ended(self)

    def result(self) -> None:
        pass


@pytest.mark.parametrize("max_in_flight", [1, 7, 100])
def test_results_are_in_order_and_requests_in_flight_are_limited(max_in_flight) -> None:
    live: list[StubResult] = []
    arrived = threading.Condition()
    peak = 0

    def submit(request: GenerationRequest, on_end) -> StubResult:
        nonlocal peak
        with arrived:
            live.append(StubResult(request, on_end))
            peak = max(peak, len(live))
            arrived.notify()
            return live[-1]

    def end_in_any_order() -> None:
        for _ in requests:
            with arrived:
                arrived.wait_for(lambda: live)
                ending = live.pop(random.randrange(len(live)))
            ending.end()

    requests = [GenerationRequest(str(i)) for i in range(60)]
    server = threading.Thread(target=end_in_any_order)
    server.start()
    batch = BatchRun(submit, max_in_flight)
    batch.run(requests, show=False)
    server.join()
    assert [result.request for result in batch.results] == requests
    assert peak <= max_in_flight


def test_max_in_flight_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_in_flight is 0, must be at least 1"):
        BatchRun(lambda *_: None, 0)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("text", False),
        ([1, 2], False),
        ([{"role": "user", "content": "x"}], False),
        (["a", "b"], True),
        ([[1, 2], [3]], True),
        ([[{"role": "user", "content": "x"}]], True),
        (("a",), True),
        ([], True),
        (5, False),
    ],
)
def test_is_batch(inputs, expected) -> None:
    assert is_batch(inputs) is expected


def test_progress_is_shown_only_on_stderr(executor, capsys) -> None:
    results = executor.generate([f"p{i}" for i in range(40)], max_in_flight=5)
    captured = capsys.readouterr()
    assert "40/40" in captured.err
    assert captured.out == ""
    assert [result.request.inputs for result in results] == [f"p{i}" for i in range(40)]
    assert all(result.done for result in results)
    executor.generate(["a", "b"], use_tqdm=False)
    executor.generate("a")
    assert capsys.readouterr().err == ""


def test_progress_bar_on_a_terminal(executor, monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    executor.generate(["a"] * 10)
    assert "10/10" in terminal.getvalue()


def test_single_prompt_and_empty_list(executor) -> None:
    assert executor.generate([1, 2]).outputs[0].text == "Hello, world"
    assert executor.generate([]) == []


def test_sampling_params_per_prompt(executor, script) -> None:
    params = [SamplingParams(max_tokens=i) for i in (1, 2, 3)]
    executor.generate(["a", "b", "c"], params, client_id=4)
    sent = {request.spec.text: request.spec.stopping.max_tokens for request in script.seen}
    assert sent == {"a": 1, "b": 2, "c": 3}
    with pytest.raises(ValueError, match="sampling_params has 2 entries, must have one for each of the 3 inputs"):
        executor.generate(["a", "b", "c"], params[:2])


def test_options_per_prompt_in_any_sequence(executor, script) -> None:
    params = tuple(SamplingParams(max_tokens=i) for i in (1, 2))
    adapters = [LoRARequest("one"), None]
    retention = (None, KvCacheRetentionConfig(decode_retention_priority=90))
    executor.generate(["a", "b"], params, lora_request=adapters, kv_cache_retention_config=retention, use_tqdm=False)
    sent = {
        request.spec.text: (
            request.spec.stopping.max_tokens,
            request.spec.lora_id,
            request.spec.kv_cache.decode_priority,
        )
        for request in script.seen
    }
    assert sent == {"a": (1, "one", 0), "b": (2, "", 90)}
    with pytest.raises(ValueError, match="lora_request has 2 entries, must have one for each of the 3 inputs"):
        executor.generate(["a", "b", "c"], lora_request=adapters)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lora_request": [LoRARequest("one")]},
        {"lora_request": "one"},
        {"kv_cache_retention_config": [KvCacheRetentionConfig()]},
        {"sampling_params": (SamplingParams(),)},
    ],
)
def test_a_single_prompt_accepts_no_lists_of_options(executor, wrong) -> None:
    with pytest.raises(TypeError, match=next(iter(wrong))):
        executor.generate_async("a", **wrong)


def test_a_failure_is_raised_and_cancels_the_rest(executor, script) -> None:
    script.hangs = True
    wrong = SamplingParams(seed=-1)
    with pytest.raises(RequestError, match=r"request 4: spec.sampling.seed"):
        executor.generate(["a"] * 50, [*[SamplingParams()] * 3, *[wrong] * 47], max_in_flight=4)
    assert wait_until(lambda: not executor._session._calls)
    assert executor._ready._open == {}
    assert len(script.hanging) <= 3
    script.hangs = False
    assert executor.generate("a").outputs[0].text == "Hello, world"


def test_requests_are_retried_while_the_server_is_overloaded(executor, script) -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(nanos=10_000_000))
    script.failure = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (retry,))
    with pytest.raises(RequestError) as caught:
        executor.generate_async("x").result(60)
    assert isinstance(caught.value.error, Overloaded)
    num_sent = len(script.seen)

    retried: list[bool] = []

    def recover() -> None:
        retried.append(wait_until(lambda: len(script.seen) >= num_sent + 6))
        script.failure = None

    thread = threading.Thread(target=recover)
    thread.start()
    results = executor.generate(["a", "b"])
    thread.join()
    assert retried == [True]
    assert [result.outputs[0].text for result in results] == ["Hello, world"] * 2
