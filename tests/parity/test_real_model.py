"""A model that people use gives the log-probabilities and greedy tokens of transformers, in float32."""

from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sluice.wire.params import SamplingParams, StopParams
from tests.parity.conftest import greedy
from tests.parity.harness import EngineHarness

GREEDY = SamplingParams(temperature=0.0, logprobs=0)
MAX_TOKENS = 20
QUESTION = (
    "Write a Python function that returns the n-th Fibonacci number, and one in C++ that prints the first 12: 0, 1, 1, "
    "2, 3, 5, … Then explain in 日本語 how fast both are: O(n) or O(2ⁿ)?"
)
CLOSE = 5e-4
"""Tolerance of a log-probability; measured differences are up to 6e-5."""


class Oracle(NamedTuple):
    prompt: list[int]
    logprobs: torch.Tensor
    """[T - 1, vocab], of the tokens that may follow each token of the prompt but the last."""
    tokens: list[int]


@pytest.fixture(scope="module")
def oracle(real_model) -> Oracle:
    chat = [{"role": "user", "content": QUESTION}]
    prompt = AutoTokenizer.from_pretrained(real_model).apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32).eval()
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    return Oracle(prompt, logprobs, *greedy(model, [prompt], MAX_TOKENS))


@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_prompt_logprobs_and_greedy_tokens_equal_transformers(real_model, oracle, backend):
    harness = EngineHarness(real_model, backend=backend, kv_cache_tokens=1024, max_tokens_per_step=64)
    number = harness.send(oracle.prompt, GREEDY, StopParams(MAX_TOKENS), prompt_logprobs=3)
    harness.run()
    assert harness.stream(number).tokens == oracle.tokens
    rows = harness.prompt_logprobs(number)
    assert len(rows) == len(oracle.prompt) - 1 > 80
    for (logprob, _, best), row, token in zip(rows, oracle.logprobs, oracle.prompt[1:], strict=True):
        assert logprob == pytest.approx(row[token].item(), abs=CLOSE)
        assert [value for _, value in best] == pytest.approx(row.topk(3).values.tolist(), abs=CLOSE)
