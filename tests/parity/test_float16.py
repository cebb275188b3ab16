"""Streams in float16, which a CPU computes only with the reference attention.

After a preemption and a resume, too, each token has the log-probability that transformers computes in float32, up to
rounding.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice import tiny_model
from sluice.wire.params import SamplingParams, StopParams
from tests.parity.harness import DEVICE, EngineHarness

ROUNDING = 0.02
"""The largest difference seen is 0.007."""
STOPPING = StopParams(max_tokens=32)
DELIVERED = 12
"""Tokens that a resumed stream had before."""


@pytest.fixture
def harness() -> EngineHarness:
    """Its memory is too small for all streams to their end."""
    attention = "reference" if DEVICE == "cpu" else "auto"
    pool = {"kv_cache_tokens": 160, "max_batch_size": 4, "max_tokens_per_step": 32}
    return EngineHarness(tiny_model.path(), dtype="float16", attention=attention, **pool)


@torch.inference_mode()
def test_preempted_and_resumed_streams_in_float16(harness, prompts):
    assert harness.runner.choices["dtype"] == "float16"
    requests = [
        (prompts[24][:41], SamplingParams(temperature=0.0, logprobs=0)),
        (prompts[25][:33], SamplingParams(seed=7, temperature=1.0, logprobs=0)),
        (prompts[26][:9], SamplingParams(seed=8, temperature=1.0, logprobs=0)),
    ]
    numbers = [harness.send(*request, STOPPING) for request in requests]
    harness.run()
    assert harness.pauses > 0
    streams = [harness.stream(number) for number in numbers]
    delivered = [stream.tokens[:DELIVERED] for stream in streams]
    for request, tokens in zip(requests, delivered, strict=True):
        numbers.append(harness.send(*request, STOPPING, resume={0: tokens}, salt="uncached"))
    harness.run()
    streams += [harness.stream(number) for number in numbers[3:]]
    assert [stream.tokens[:DELIVERED] for stream in streams] == delivered * 2
    model = AutoModelForCausalLM.from_pretrained(tiny_model.path(), dtype=torch.float32).eval()
    for (prompt, _), stream in zip(requests * 2, streams, strict=True):
        assert len(stream.tokens) == STOPPING.max_tokens
        logprobs = model(torch.tensor([prompt + stream.tokens])).logits[0, :-1].log_softmax(-1)
        new = len(stream.logprobs)
        expected = [row[token].item() for row, token in zip(logprobs[-new:], stream.tokens[-new:], strict=True)]
        assert [entry.logprob for entry in stream.logprobs] == pytest.approx(expected, abs=ROUNDING)
    assert [len(stream.logprobs) for stream in streams] == [32] * 3 + [32 - DELIVERED] * 3
