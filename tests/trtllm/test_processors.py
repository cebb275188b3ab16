"""Logits post-processors that run in the program, with TensorRT-LLM's signatures."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

import sluice.trtllm as trtllm
from tests.fakes.processes import wait_until
from tests.trtllm.running import GREEDY, LIMIT, PROMPT, results, run, start

pytestmark = pytest.mark.process


class Calls:
    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def only(self, request_id, logits, ids, stream, client_id) -> None:
        self.seen.append((request_id, [list(sequence) for sequence in ids], stream, client_id))
        logits[:] = -torch.inf
        logits[..., 42] = 0


@pytest.fixture(scope="module")
def calls() -> Calls:
    return Calls()


@pytest.fixture(scope="module")
def executor(calls) -> Iterator[trtllm.Executor]:
    def without_client_id(request_id, logits, ids, stream):
        assert isinstance(request_id, int)
        logits[..., 44] = 1000.0

    config = {
        "only": calls.only,
        "without_client_id": without_client_id,
        "adds": lambda _, logits, *__: logits + 5,
        "raises": lambda *_: 1 / 0,
    }

    def batched(request_ids, logits_batch, ids_batch, stream, client_ids):
        calls.seen.append((request_ids, ids_batch, stream, client_ids))
        for logits in logits_batch:
            logits[..., 43] = 1000.0

    processors = trtllm.LogitsPostProcessorConfig(config, batched)
    with start(logits_post_processor_config=processors) as executor:
        yield executor


def tokens(executor, name, **options) -> list[int]:
    (result,) = results(executor, logits_post_processor_name=name, **options)
    return result.output_token_ids[0][len(PROMPT) :]


def test_a_method(executor, calls) -> None:
    calls.seen.clear()
    assert tokens(executor, "only", client_id=123) == [42] * 5
    request_id = calls.seen[0][0]
    assert isinstance(request_id, int)
    assert calls.seen[:5] == [(request_id, [PROMPT + [42] * i], 0, 123) for i in range(5)]


def test_several_sequences_of_a_request(executor, calls) -> None:
    calls.seen.clear()
    sampling = trtllm.SamplingConfig(num_return_sequences=2)
    sequences = results(executor, logits_post_processor_name="only", sampling_config=sampling)
    assert [sequence.output_token_ids[0][len(PROMPT) :] for sequence in sequences] == [[42] * 5] * 2
    assert len({request_id for request_id, *_ in calls.seen}) == 1


def test_without_the_client_id(executor) -> None:
    assert tokens(executor, "without_client_id") == [44] * 5


def test_batched(executor, calls) -> None:
    calls.seen.clear()
    assert tokens(executor, trtllm.Request.BATCHED_POST_PROCESSOR_NAME, client_id=7) == [43] * 5
    ids, token_ids, stream, client_ids = calls.seen[0]
    assert (len(ids), stream, client_ids) == (1, 0, [7])
    assert isinstance(ids[0], int)
    assert token_ids[0][0][:4] == PROMPT


def test_the_return_value_is_ignored(executor) -> None:
    assert tokens(executor, "adds") == GREEDY


def test_a_processor_that_raises(executor) -> None:
    (response,) = run(executor, logits_post_processor_name="raises")
    assert "the logits processor 'raises' raised ZeroDivisionError" in response.error_msg
    assert tokens(executor, "only", client_id=123) == [42] * 5


class Only:
    """The function of one request: only its token can be generated."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.seen: list[tuple] = []

    def __call__(self, request_id, logits, ids, stream, client_id) -> None:
        self.seen.append((request_id, [list(sequence) for sequence in ids], stream, client_id))
        logits[:] = -torch.inf
        logits[..., self.token] = 0


def test_functions_of_requests(executor) -> None:
    functions = [Only(token) for token in (50, 51, 52)]
    requests = [
        trtllm.Request(PROMPT, 5, logits_post_processor=processor, client_id=processor.token) for processor in functions
    ]
    ids = executor.enqueue_requests(requests)
    for request_id, function, (response,) in zip(ids, functions, executor.await_responses(ids, LIMIT), strict=True):
        token = function.token
        assert response.result.output_token_ids == [PROMPT + [token] * 5]
        assert function.seen[:5] == [(request_id, [PROMPT + [token] * i], 0, token) for i in range(5)]


def test_the_function_of_a_request_with_several_sequences(executor) -> None:
    function, sampling = Only(53), trtllm.SamplingConfig(num_return_sequences=2)
    sequences = results(executor, logits_post_processor=function, sampling_config=sampling)
    assert [sequence.output_token_ids[0][len(PROMPT) :] for sequence in sequences] == [[53] * 5] * 2
    assert len({request_id for request_id, *_ in function.seen}) == 1


def test_a_request_does_not_call_the_function_of_another(executor) -> None:
    function = Only(54)
    request_id = executor.enqueue_request(trtllm.Request(PROMPT, 200, logits_post_processor=function))
    assert tokens(executor, "only") == [42] * 5
    assert tokens(executor, None) == GREEDY
    (response,) = executor.await_responses(request_id, LIMIT)
    assert response.result.output_token_ids == [PROMPT + [54] * 200]
    assert {called_id for called_id, *_ in function.seen} == {request_id}


def test_a_function_of_a_request_that_raises(executor) -> None:
    (response,) = run(executor, logits_post_processor=lambda *_: 1 / 0)
    assert "raised ZeroDivisionError" in response.error_msg
    assert tokens(executor, None, logits_post_processor=Only(55)) == [55] * 5


def test_the_function_of_a_request_is_dropped_with_the_request(executor) -> None:
    function = Only(56)
    reference = weakref.ref(function)
    tokens(executor, None, logits_post_processor=function)
    del function
    assert wait_until(lambda: gc.collect() >= 0 and reference() is None)


def test_the_function_of_a_request_needs_no_configuration() -> None:
    def without_client_id(request_id, logits, ids, stream):
        logits[..., 57] = 1000.0

    with start() as executor:
        assert tokens(executor, None, logits_post_processor=without_client_id) == [57] * 5


def test_invalid_functions_of_requests(executor) -> None:
    with pytest.raises(trtllm.OptionError, match="logits_post_processor and logits_post_processor_name cannot be"):
        run(executor, logits_post_processor=print, logits_post_processor_name="only")
    with pytest.raises(trtllm.UnsupportedOptionError, match=r"Request\.logits_post_processor = 'my:function'"):
        run(executor, logits_post_processor="my:function")
    config = trtllm.LogitsPostProcessorConfig({"dynamic": print})
    with pytest.raises(trtllm.OptionError, match="'dynamic' is reserved"):
        start(logits_post_processor_config=config)
