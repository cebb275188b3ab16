"""Responses: of any request and of chosen requests, with all or only new tokens, after errors."""

import grpc
import numpy as np
import pytest

from sluice.executor import GenerationRequest, RequestError
from tests.fakes.failures import Failure, bad_request

LIMIT = 60


async def test_iteration_raises_an_error_that_another_reader_has_read(executor, script) -> None:
    script.failure = Failure(grpc.StatusCode.INTERNAL, "boom")
    first, second = (executor.generate_async("x", streaming=True) for _ in range(2))
    for result in (first, second):
        (response,) = executor.await_responses(result.request_id, LIMIT)
        assert response.has_error()
    with pytest.raises(RequestError, match="boom"):
        next(first)
    assert list(first) == []
    with pytest.raises(RequestError, match="boom"):
        await anext(second)
    assert [partial async for partial in second] == []


def test_responses_of_any_request(executor) -> None:
    ids = [executor.generate_async("x", streaming=streaming, client_id=9).request_id for streaming in (False, True)]
    texts, final = dict.fromkeys(ids, ""), set()
    while len(final) < 2:
        for response in executor.await_responses(timeout=LIMIT):
            assert not response.has_error()
            assert (response.error_msg, response.client_id, response.result.sequence_index) == ("", 9, 0)
            assert response.result.is_final == response.result.is_sequence_final
            texts[response.request_id] += response.result.text
            if response.result.is_final:
                final.add(response.request_id)
    assert set(texts.values()) == {"Hello, world"}
    assert executor.await_responses(timeout=0) == []
    for request_id in ids:
        with pytest.raises(ValueError, match=f"no request {request_id}"):
            executor.await_responses(request_id)


def test_responses_of_chosen_requests(executor, script) -> None:
    first, second = executor.generate_async("x"), executor.generate_async("x")
    ((response,),) = executor.await_responses([second.request_id], timeout=LIMIT)
    assert (response.request_id, response.result.finish_reasons) == (second.request_id, ["stop"])
    assert (second.done, second.outputs[0].text, first.done) == (True, "Hello, world", False)
    assert [answer.result.output_token_ids for answer in executor.await_responses(first.request_id)] == [[[0, 1, 2]]]
    script.hangs = True
    third = executor.generate_async("x")
    assert executor.await_responses(third.request_id, timeout=0.05) == []


def test_an_error_is_a_response(executor, script) -> None:
    script.failure = bad_request("spec.text", "is bad")
    request_id = executor.generate_async("x").request_id
    (response,) = executor.await_responses(request_id, LIMIT)
    assert response.has_error()
    assert response.result is None
    assert "spec.text" in response.error_msg


@pytest.mark.parametrize("returns_all", [False, True])
def test_all_or_new_tokens_per_response(executor, returns_all) -> None:
    request = GenerationRequest("x", streaming=True, return_all_generated_tokens=returns_all)
    result = executor.submit(request)
    received: list[int] = []
    while not result.done:
        for response in executor.await_responses(result.request_id, LIMIT):
            (ids,) = response.result.output_token_ids
            received = ids if returns_all else received + ids
    assert received == [0, 1, 2]


def test_an_unknown_id_costs_no_responses_of_others(executor) -> None:
    known = executor.enqueue_request(GenerationRequest("x"))
    with pytest.raises(ValueError, match="no request 99"):
        executor.await_responses([known, 99], LIMIT)
    with pytest.raises(TypeError, match=r"request_id\[1\] must be an integer \(got 'y'\)"):
        executor.await_responses([known, "y"], LIMIT)
    ((response,),) = executor.await_responses(np.array([known]), LIMIT)
    assert response.request_id == known


@pytest.mark.parametrize("bad", ["x", GenerationRequest("x", return_perf_metrics=True)])
def test_a_bad_request_of_several_keeps_all_from_being_submitted(executor, script, bad) -> None:
    with pytest.raises((TypeError, ValueError), match=r"requests\[1\]"):
        executor.enqueue_requests([GenerationRequest("x"), bad])
    assert executor.generate("y").request_id == 1
    assert [request.spec.text for request in script.seen] == ["y"]
