"""A program with logits post-processors that the engine imports: python logits_processor.py [--batched].

Run it in this folder: the engine imports from its working directory.
"""

import argparse
import datetime

from digits import only_digits, only_digits_batched
from tokenizers import Tokenizer

import sluice.trtllm as trtllm
from sluice import tiny_model

PROMPTS = ("year = ", "size = 1")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batched", action="store_true", help="one call for all requests of a step")
args = parser.parse_args()

config = trtllm.ExecutorConfig(kv_cache_config=trtllm.KvCacheConfig(max_tokens=8192))
config.logits_post_processor_config = trtllm.LogitsPostProcessorConfig({"digits": only_digits}, only_digits_batched)
executor = trtllm.Executor(tiny_model.path(), trtllm.ModelType.DECODER_ONLY, config)
name = trtllm.Request.BATCHED_POST_PROCESSOR_NAME if args.batched else "digits"

tokenizer = Tokenizer.from_file(str(tiny_model.path() / "tokenizer.json"))
prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
requests = [trtllm.Request(tokens, 6, logits_post_processor_name=name) for tokens in prompts]
waiting = set(executor.enqueue_requests(requests))
while waiting:
    for response in executor.await_responses(datetime.timedelta(seconds=60)):
        waiting.discard(response.request_id)
        if response.has_error():
            raise SystemExit(response.error_msg)
        print(tokenizer.decode(response.result.output_token_ids[0]))
executor.shutdown()
