"""Results and responses as values."""

import pickle

import pytest

import sluice.trtllm as trtllm


def test_a_response_has_a_result_or_an_error() -> None:
    failed = trtllm.Response(3, "no", 7)
    assert (failed.request_id, failed.client_id, failed.has_error(), failed.error_msg) == (3, 7, True, "no")
    with pytest.raises(RuntimeError, match="request 3 failed and has no result: no"):
        _ = failed.result
    successful = trtllm.Response(request_id=4, result=trtllm.Result(output_token_ids=[[1]]))
    assert successful.result.output_token_ids == [[1]]
    with pytest.raises(RuntimeError, match="has no error"):
        _ = successful.error_msg
    with pytest.raises(TypeError):
        trtllm.Response(5)
    with pytest.raises(TypeError):
        trtllm.Response(5, "no", result=trtllm.Result())


def test_logits_can_be_cleared() -> None:
    response = trtllm.Response(1, trtllm.Result(context_logits=[1], generation_logits=[2]))
    response.clear_context_logits()
    response.clear_generation_logits()
    assert (response.result.context_logits, response.result.generation_logits) == (None, None)
    trtllm.Response(1, "no").clear_context_logits()


def test_pickled_and_back() -> None:
    result = trtllm.Result(True, [[1, 2]], [0.5], [[0.25]], finish_reasons=[trtllm.FinishReason.LENGTH])
    result.request_perf_metrics = trtllm.RequestPerfMetrics(last_iter=33)
    result.avg_decoded_tokens_per_iter = 1.5
    copy = pickle.loads(pickle.dumps(trtllm.Response(9, result, 8)))
    assert (copy.request_id, copy.client_id) == (9, 8)
    assert vars(copy.result) == vars(result)
