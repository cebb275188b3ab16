"""Logits post-processors that are functions of the program itself, in TensorRT-LLM's forms."""

from collections.abc import Iterator

import pytest
import torch

import sluice.trtllm as trtllm
from tests.trtllm.running import GREEDY, PROMPT, results, run, start

pytestmark = pytest.mark.process


class Calls:
    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def only(self, request_id, logits, ids, stream, client_id) -> None:
        self.seen.append((request_id, [list(each) for each in ids], stream, client_id))
        logits[:] = -torch.inf
        logits[..., 42] = 0


@pytest.fixture(scope="module")
def calls() -> Calls:
    return Calls()


@pytest.fixture(scope="module")
def executor(calls) -> Iterator[trtllm.Executor]:
    def older(request_id, logits, ids, stream):
        assert isinstance(request_id, int)
        logits[..., 44] = 1000.0

    config = {"only": calls.only, "older": older, "adds": lambda _, logits, *__: logits + 5, "raises": lambda *_: 1 / 0}

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
    found = results(executor, logits_post_processor_name="only", sampling_config=sampling)
    assert [each.output_token_ids[0][len(PROMPT) :] for each in found] == [[42] * 5] * 2
    assert len({request_id for request_id, *_ in calls.seen}) == 1


def test_without_the_client_id(executor) -> None:
    assert tokens(executor, "older") == [44] * 5


def test_batched(executor, calls) -> None:
    calls.seen.clear()
    assert tokens(executor, trtllm.Request.BATCHED_POST_PROCESSOR_NAME, client_id=7) == [43] * 5
    ids, token_ids, stream, client_ids = calls.seen[0]
    assert (len(ids), stream, client_ids) == (1, 0, [7])
    assert isinstance(ids[0], int)
    assert token_ids[0][0][:4] == PROMPT


def test_a_lambda_whose_result_does_not_count(executor) -> None:
    assert tokens(executor, "adds") == GREEDY


def test_one_that_raises(executor) -> None:
    (response,) = run(executor, logits_post_processor_name="raises")
    assert "the logits processor 'raises' raised ZeroDivisionError" in response.error_msg
    assert tokens(executor, "only", client_id=123) == [42] * 5
