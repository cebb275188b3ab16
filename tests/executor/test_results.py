"""Results as futures and as iterators, with a fake server."""

import asyncio
import gc
import threading

import grpc
import pytest

from sluice.client import InvalidRequest, NotImplementedByServer, Unavailable
from sluice.executor import GenerationExecutor, GenerationRequest, RequestError, SamplingParams
from tests.fakes.breaking_routers import GONE, Plan, run_routers
from tests.fakes.failures import Failure, bad_request
from tests.fakes.processes import wait_until

LIMIT = 60


def test_complete_result(executor, script) -> None:
    result = executor.generate_async([5, 6], SamplingParams(max_tokens=3, logprobs=0), client_id=7)
    assert result.result(LIMIT) is result
    assert result.done
    assert result.finished
    (output,) = result.outputs
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == (
        "Hello, world",
        [0, 1, 2],
        "stop",
        "!",
    )
    assert (output.text_diff, output.token_ids_diff, output.length) == ("Hello, world", [0, 1, 2], 3)
    assert (result.usage.prompt_tokens, result.client_id, result.prompt_token_ids) == (3, 7, [5, 6])
    assert list(result) == []
    assert list(script.seen[-1].spec.token_ids.ids) == [5, 6]


def test_stream(executor) -> None:
    texts, ids = [], []
    result = executor.generate_async("x", streaming=True)
    for partial in result:
        assert partial is result
        texts.append(partial.outputs[0].text_diff)
        ids += partial.outputs[0].token_ids_diff
        assert partial.outputs[0].text == "".join(texts)
    assert "".join(texts) == "Hello, world"
    assert ids == result.outputs[0].token_ids == [0, 1, 2]
    assert (result.done, result.outputs[0].finish_reason, result.usage.completion_tokens) == (True, "length", 3)
    assert result.result(0) is result


async def test_in_an_event_loop(executor) -> None:
    texts = [partial.outputs[0].text_diff async for partial in executor.generate_async("x", streaming=True)]
    assert "".join(texts) == "Hello, world"
    first, second = await asyncio.gather(executor.generate_async("x"), executor.generate_async("x").aresult())
    assert first.outputs == second.outputs
    assert [partial async for partial in first] == []


async def test_an_await_can_be_cancelled(executor, script) -> None:
    script.hangs = True
    result = executor.generate_async("x")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await result
    result.abort()
    assert (await result).outputs[0].finish_reason == "cancelled"


def test_a_timeout_does_not_stop_the_request(executor, script) -> None:
    script.hangs = True
    result = executor.generate_async("x")
    with pytest.raises(TimeoutError, match=rf"request {result.request_id} did not end within 0.05 s"):
        result.result(0.05)
    assert not result.done
    result.abort()
    assert result.aborted()
    assert result.result(LIMIT).outputs[0].finish_reason == "cancelled"


@pytest.mark.parametrize("streaming", [False, True])
def test_abort_by_id_keeps_the_tokens_so_far(executor, script, streaming) -> None:
    script.hangs = True
    result = executor.generate_async("x", streaming=streaming)
    assert wait_until(lambda: bool(script.hanging))
    executor.abort_request(result.request_id)
    assert result.result(LIMIT).outputs[0].text == "Hello, world"
    assert result.outputs[0].finish_reason == "cancelled"
    executor.abort_request(result.request_id)
    executor.abort_request(12345)


def test_abort_before_it_is_sent(address, script) -> None:
    script.hangs = True
    with GenerationExecutor.connect(address, max_in_flight=1, iter_stats_max_iterations=0) as executor:
        first, second = executor.generate_async("x"), executor.generate_async("x")
        assert wait_until(lambda: bool(script.hanging))
        second.abort()
        assert second.result(LIMIT).outputs[0].finish_reason == "cancelled"
        assert second.outputs[0].text == ""
        assert not first.done
        first.abort()
        first.result(LIMIT)
    assert len(script.hanging) == 1


def test_an_error_affects_only_its_request(executor, script) -> None:
    script.failure = bad_request("spec.sampling.temperature", "is 9")
    result = executor.generate_async("x", SamplingParams(temperature=9), client_id=3)
    with pytest.raises(RequestError, match=r"request 1: spec.sampling.temperature: is 9") as caught:
        result.result(LIMIT)
    error = caught.value
    assert (error.request_id, error.client_id, error.retryable) == (1, 3, False)
    assert isinstance(error.error, InvalidRequest)
    assert error.error.violations[0].field == "spec.sampling.temperature"
    assert error.__cause__ is error.error
    assert result.done
    assert result.error is error
    with pytest.raises(RequestError):
        result.result(LIMIT)
    script.failure = None
    assert executor.generate_async("x").result(LIMIT).outputs[0].text == "Hello, world"


def test_an_option_that_the_server_does_not_implement(executor, script) -> None:
    script.failure = Failure(grpc.StatusCode.UNIMPLEMENTED, "not built yet: spec.sampling.bad_words")
    with pytest.raises(RequestError, match="bad_words") as caught:
        executor.generate_async("x", SamplingParams(bad="y")).result(LIMIT)
    assert isinstance(caught.value.error, NotImplementedByServer)


@pytest.mark.parametrize(("inputs", "params"), [(b"x", SamplingParams()), ("x", SamplingParams(stop=5))])
def test_wrong_types_fail_the_request(executor, inputs, params) -> None:
    with pytest.raises(RequestError) as caught:
        executor.generate_async(inputs, params).result(LIMIT)
    assert isinstance(caught.value.error, TypeError)


async def test_a_broken_stream_keeps_the_tokens_so_far(executor, script) -> None:
    script.failure, script.fail_after = Failure(grpc.StatusCode.UNAVAILABLE, "engine lost"), 2
    result = executor.generate_async("x", streaming=True)
    with pytest.raises(RequestError, match="engine lost") as caught:
        list(result)
    assert isinstance(caught.value.error, Unavailable)
    assert caught.value.retryable
    assert "Hello, world".startswith(result.outputs[0].text)
    with pytest.raises(RequestError, match="engine lost"):
        _ = [partial async for partial in executor.generate_async("x", streaming=True)]


def test_token_ids_of_a_prompt(executor, script) -> None:
    assert executor.generate_async("ab").prompt_token_ids == [97, 98]
    assert executor.generate_async("abc", SamplingParams(truncate_prompt_tokens=2)).prompt_token_ids == [98, 99]
    with pytest.raises(TypeError, match="chat"):
        _ = executor.generate_async([{"role": "user", "content": "x"}]).prompt_token_ids


def test_request_ids_are_unique(executor) -> None:
    request = GenerationRequest("x", client_id=1)
    results = [executor.submit(request) for _ in range(20)]
    assert len({result.request_id for result in results}) == 20
    assert {result.result(LIMIT).outputs[0].text for result in results} == {"Hello, world"}


def test_several_threads(executor) -> None:
    texts: list[str] = []

    def work() -> None:
        for _ in range(10):
            texts.append(executor.generate("x", use_tqdm=False).outputs[0].text)
            texts.extend(
                partial.outputs[0].text for partial in [executor.generate_async("x", streaming=True).result(LIMIT)]
            )

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["Hello, world"] * 80


def test_two_readers_of_a_result(executor) -> None:
    for _ in range(20):
        result = executor.generate_async("x", streaming=True)
        reader = threading.Thread(target=result.result)
        reader.start()
        result.result(LIMIT)
        reader.join()
        assert result.outputs[0].text == "Hello, world"


def test_calls_after_shutdown(address) -> None:
    executor = GenerationExecutor.connect(address, iter_stats_max_iterations=0)
    executor.shutdown()
    for call in (lambda: executor.generate_async("x"), lambda: executor.tokenize("x")):
        with pytest.raises(RuntimeError, match="shut down"):
            call()
    executor.abort_request(1)


def test_no_server() -> None:
    with pytest.raises(Unavailable):
        GenerationExecutor.connect("127.0.0.1:1")


@pytest.mark.slow
def test_a_garbage_collected_executor_closes(address, script) -> None:
    executor = GenerationExecutor.connect(address)
    assert executor.generate("x").outputs[0].text == "Hello, world"
    assert not script.gone.is_set()
    del executor
    gc.collect()
    assert script.gone.wait(LIMIT)


def test_ended_requests_leave_no_state(executor) -> None:
    for _ in range(5):
        executor.generate_async("x", streaming=True).result(LIMIT)
        executor.generate("x")
    assert executor._ready._open == {}
    assert executor._ready._marked == {}
    assert wait_until(lambda: not executor._session._calls)


def test_an_event_loop_may_close_while_it_waits(executor, script) -> None:
    script.hangs = True
    result = executor.generate_async("x")
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(result.aresult())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    result.abort()
    assert result.result(LIMIT).done
    assert not waiting.done()
    waiting._log_destroy_pending = False


def test_streams_resume_at_the_next_router() -> None:
    plan = Plan()
    with run_routers(2, plan) as addresses:
        options = {"iter_stats_max_iterations": 0, "tenant": "acme"}
        with GenerationExecutor.connect(addresses, **options) as executor:
            params = SamplingParams(max_tokens=8, n=2, logprobs=0)
            expected = executor.generate_async("x", params, streaming=True).result(LIMIT)
            plan.breaks.append((4, GONE))
            broken = executor.generate_async("x", params, streaming=True).result(LIMIT)
    assert [(output.text, output.token_ids, output.cumulative_logprob) for output in broken.outputs] == [
        (output.text, output.token_ids, output.cumulative_logprob) for output in expected.outputs
    ]
    assert (len(plan.seen), plan.metadata[-1]["x-sluice-tenant"]) == (3, "acme")
