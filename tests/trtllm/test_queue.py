"""Requests of an executor whose ring is a fake server: a bad one never costs the responses of others."""

from datetime import timedelta

import numpy as np
import pytest
import torch

import sluice.trtllm as trtllm
from sluice import tiny_model
from sluice.executor import GenerationExecutor
from tests.fakes.server import serve
from tests.fakes.server_script import Script

LIMIT = timedelta(seconds=30)
BROKEN = trtllm.Request([1], 4, stop_words=[[1]])
BROKEN.stop_words.append([])


@pytest.fixture
def executor(monkeypatch):
    with serve(Script()) as address:
        connected = GenerationExecutor.connect(address, resume_timeout=0)
        monkeypatch.setattr(GenerationExecutor, "create", lambda *_, **__: connected)
        with trtllm.Executor(tiny_model.path(), trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig()) as executor:
            yield executor


def ids(responses: list[trtllm.Response]) -> list[int]:
    return [response.request_id for response in responses]


@pytest.mark.parametrize("bad", [BROKEN, trtllm.Request([1], 4, lora_config=trtllm.LoraConfig(1)), "no request"])
def test_a_request_that_is_refused_costs_no_responses_of_others(executor, bad) -> None:
    before = executor.enqueue_request(trtllm.Request([1], 4))
    with pytest.raises((IndexError, NotImplementedError, TypeError)):
        executor.enqueue_request(bad)
    with pytest.raises((IndexError, NotImplementedError, TypeError)) as caught:
        executor.enqueue_requests([trtllm.Request([1], 4), bad])
    assert caught.value.__notes__ == ["in requests[1]; none of the requests was enqueued"]
    after = executor.enqueue_request(trtllm.Request([1], 4))
    received = []
    while len(received) < 2:
        received += executor.await_responses(LIMIT)
    assert sorted(ids(received)) == [before, after]
    assert executor.get_num_responses_ready() == 0
    assert executor.await_responses(timedelta(milliseconds=1)) == []


def test_an_unknown_id_costs_no_responses_of_others(executor) -> None:
    known = executor.enqueue_request(trtllm.Request([1], 4))
    with pytest.raises(ValueError, match="no request 99: it was never enqueued"):
        executor.await_responses([known, 99], LIMIT)
    with pytest.raises(TypeError, match=r"ids\[1\] must be an integer \(got 'x'\)"):
        executor.await_responses([known, "x"], LIMIT)
    (responses,) = executor.await_responses([known], LIMIT)
    assert ids(responses) == [known]


def test_ids_of_numpy_and_torch(executor) -> None:
    request = trtllm.Request(np.array([1, 2]), np.int64(4), end_id=torch.tensor(9), stop_words=[torch.tensor([5])])
    assert (request.input_token_ids, request.end_id, request.stop_words) == ([1, 2], 9, [[5]])
    first, second, third = (executor.enqueue_request(request) for _ in range(3))
    assert ids(executor.await_responses(np.int64(first), LIMIT)) == [first]
    for other, each in ((second, np.array([second])), (third, torch.tensor([third]))):
        assert [ids(responses) for responses in executor.await_responses(each, LIMIT)] == [[other]]
