"""Requests: defaults, checks and pickling."""

import pickle
from datetime import timedelta

import pytest
import torch

import sluice.trtllm as trtllm


def test_defaults() -> None:
    request = trtllm.Request([1, 2, 3], 5)
    assert (request.streaming, request.end_id, request.priority, request.client_id) == (False, None, 0.5, None)
    assert request.request_type is trtllm.RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION
    assert request.sampling_config == trtllm.SamplingConfig()
    assert request.output_config == trtllm.OutputConfig()
    context = trtllm.Request([1], 1, type=trtllm.RequestType.REQUEST_TYPE_CONTEXT_ONLY)
    assert context.request_type is trtllm.RequestType.REQUEST_TYPE_CONTEXT_ONLY


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError):
        trtllm.Request([1], 5, True)
    with pytest.raises(TypeError):
        trtllm.Request([1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_token_ids": []}, "input_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"embedding_bias": torch.ones(1, 2)}, "embedding_bias"),
        ({"priority": 1.5}, "priority"),
    ],
)
def test_out_of_range(options, message) -> None:
    with pytest.raises(RuntimeError, match=rf"Request\.{message} is "):
        trtllm.Request(**{"input_token_ids": [1], "max_tokens": 1} | options)


def test_a_guide_with_beams() -> None:
    guide = trtllm.GuidedDecodingParams(trtllm.GuidedDecodingParams.GuideType.JSON)
    with pytest.raises(RuntimeError, match="guided_decoding_params"):
        trtllm.Request([1], 1, sampling_config=trtllm.SamplingConfig(2), guided_decoding_params=guide)


def test_pickled_and_back() -> None:
    request = trtllm.Request(
        [1, 2],
        5,
        sampling_config=trtllm.SamplingConfig(top_k=10),
        embedding_bias=torch.arange(3.0),
        bad_words=[[4, 5]],
        allotted_time_ms=timedelta(milliseconds=2),
        lora_config=trtllm.LoraConfig(1, torch.ones(1, 2), torch.ones(1, 3, dtype=torch.int32)),
    )
    copy = pickle.loads(pickle.dumps(request))
    assert (copy.input_token_ids, copy.max_tokens, copy.bad_words) == ([1, 2], 5, [[4, 5]])
    assert copy.sampling_config == request.sampling_config
    assert torch.equal(copy.embedding_bias, request.embedding_bias)
    assert copy.lora_config.task_id == 1
    assert copy.allotted_time_ms == timedelta(milliseconds=2)
