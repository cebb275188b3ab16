"""A program for TensorRT-LLM's executor with one import changed: python executor.py [--model FOLDER]."""

import argparse
import datetime

import sluice.trtllm as trtllm
from sluice import tiny_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=tiny_model.path(), help="a checkpoint folder; default: the bundled tiny model")
args = parser.parse_args()

config = trtllm.ExecutorConfig(max_beam_width=2, kv_cache_config=trtllm.KvCacheConfig(max_tokens=8192))
executor = trtllm.Executor(args.model, trtllm.ModelType.DECODER_ONLY, config)

requests = [
    trtllm.Request([1, 2, 3, 4], 8, streaming=True),
    trtllm.Request([5, 6, 7], 8, output_config=trtllm.OutputConfig(return_log_probs=True)),
    trtllm.Request([1, 2, 3, 4], 8, sampling_config=trtllm.SamplingConfig(beam_width=2)),
]
waiting = set(executor.enqueue_requests(requests))
while waiting:
    for response in executor.await_responses(datetime.timedelta(seconds=60)):
        if response.has_error():
            raise SystemExit(response.error_msg)
        result = response.result
        print(f"request {response.request_id}: {result.output_token_ids}")
        if result.is_final:
            waiting.discard(response.request_id)
executor.shutdown()
