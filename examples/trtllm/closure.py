"""A logits post-processor that runs in this program, where it can use the program's state: it counts its calls."""

import datetime
import string
from collections import Counter

import torch
from tokenizers import Tokenizer

import sluice.trtllm as trtllm
from sluice import tiny_model

tokenizer = Tokenizer.from_file(str(tiny_model.path() / "tokenizer.json"))
digits = torch.tensor([tokenizer.token_to_id(digit) for digit in string.digits])
calls: Counter[int | None] = Counter()


def only_digits(
    _request_id: int, logits: torch.Tensor, token_ids: list[list[int]], _stream: int, client_id: int | None
) -> None:
    """Allow only digits, and no digit twice in a row. `logits` [1, 1, vocabulary] are changed in place."""
    calls[client_id] += 1
    kept = logits[..., digits]
    logits.fill_(-torch.inf)
    logits[..., digits] = kept
    logits[..., token_ids[0][-1]] = -torch.inf


config = trtllm.ExecutorConfig(kv_cache_config=trtllm.KvCacheConfig(max_tokens=8192))
config.logits_post_processor_config = trtllm.LogitsPostProcessorConfig({"digits": only_digits})
executor = trtllm.Executor(tiny_model.path(), trtllm.ModelType.DECODER_ONLY, config)
waiting = set()
for client_id, prompt in enumerate(("year = ", "size = 1")):
    tokens = tokenizer.encode(prompt).ids
    request = trtllm.Request(tokens, 6, client_id=client_id, logits_post_processor_name="digits")
    waiting.add(executor.enqueue_request(request))
while waiting:
    for response in executor.await_responses(datetime.timedelta(seconds=60)):
        waiting.discard(response.request_id)
        if response.has_error():
            raise SystemExit(response.error_msg)
        print(tokenizer.decode(response.result.output_token_ids[0]))
executor.shutdown()
print("calls:", dict(sorted(calls.items())))
