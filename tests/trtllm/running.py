"""Starts executors with the tiny model, and runs requests to their end."""

from datetime import timedelta

import sluice.trtllm as trtllm
from sluice import tiny_model

LIMIT = timedelta(seconds=60)
PROMPT = [1, 2, 3, 4]
GREEDY = [2, 2, 220, 16, 15]
"""The tiny model's greedy continuation of PROMPT."""


def start(**options) -> trtllm.Executor:
    cache = trtllm.KvCacheConfig(max_tokens=8192, event_buffer_max_size=1000)
    config = trtllm.ExecutorConfig(kv_cache_config=cache, **options)
    return trtllm.Executor(tiny_model.path(), trtllm.ModelType.DECODER_ONLY, config)


def run(executor, max_tokens=5, prompt=PROMPT, **options) -> list[trtllm.Response]:
    """Run a request, and return all of its responses."""
    request_id = executor.enqueue_request(trtllm.Request(prompt, max_tokens, **options))
    responses = []
    while not responses or not (responses[-1].has_error() or responses[-1].result.is_final):
        received = executor.await_responses(request_id, LIMIT)
        assert received
        responses += received
    return responses


def results(*arguments, **options) -> list[trtllm.Result]:
    return [response.result for response in run(*arguments, **options)]
