"""A seeded request returns the same tokens in any batch and after any interruption."""

import pytest

from sluice.wire.params import SamplingParams, derive_seed
from tests.parity.harness import EngineHarness

MAX_TOKENS = 40
SAMPLING = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=1234, logprobs=2)

pytestmark = pytest.mark.one_model


@pytest.fixture(scope="module", params=["cpu", "reference"])
def attention(request):
    return request.param


QUICK_ON_CPU = pytest.mark.parametrize(
    "attention", ["cpu", pytest.param("reference", marks=pytest.mark.long)], indirect=True
)
"""`test_overlap` covers the same almost with the reference attention."""


@pytest.fixture(scope="module")
def prompt(prompts):
    return prompts[20][:60]


@pytest.fixture(scope="module")
def alone(model_folder, attention, prompt):
    (tokens,) = EngineHarness(model_folder, attention=attention).generate([prompt], SAMPLING, MAX_TOKENS)
    assert len(set(tokens)) > 5
    return tokens


def neighbours(harness: EngineHarness, prompts: list[list[int]], count: int, max_tokens: int = MAX_TOKENS) -> None:
    for i in range(count):
        harness.submit(prompts[i % len(prompts)][:50], SamplingParams(seed=i), max_tokens)


@QUICK_ON_CPU
def test_the_tokens_are_the_same_in_a_batch_of_64(model_folder, attention, prompts, prompt, alone):
    harness = EngineHarness(model_folder, attention=attention, max_batch_size=64)
    neighbours(harness, prompts, 40)
    number = harness.submit(prompt, SAMPLING, MAX_TOKENS)
    neighbours(harness, prompts, 23)
    harness.run()
    assert harness.stream(number).tokens == alone


@QUICK_ON_CPU
def test_the_tokens_are_the_same_after_a_preemption(model_folder, attention, prompts, prompt, alone):
    harness = EngineHarness(model_folder, attention=attention, kv_cache_tokens=320, max_tokens_per_step=64)
    neighbours(harness, prompts, 6)
    numbers = [harness.submit(prompt, SAMPLING, MAX_TOKENS, salt=str(i)) for i in range(6)]
    harness.run()
    assert harness.pauses > 0
    assert [harness.stream(number).tokens for number in numbers] == [alone] * 6


def test_the_tokens_are_the_same_after_a_prefix_cache_hit(model_folder, attention, prompt, alone):
    harness = EngineHarness(model_folder, attention=attention)
    harness.generate([prompt], SamplingParams(temperature=0.0), 4)
    number = harness.submit(prompt, SAMPLING, MAX_TOKENS)
    harness.run()
    assert harness.cached_tokens(number) == 48
    assert harness.stream(number).tokens == alone


@QUICK_ON_CPU
def test_logprobs_are_the_same_in_a_batch_with_preemptions(model_folder, attention, prompts, prompt):
    idle = EngineHarness(model_folder, attention=attention)
    first = idle.submit(prompt, SAMPLING, MAX_TOKENS)
    idle.run()
    busy = EngineHarness(model_folder, attention=attention, kv_cache_tokens=320, max_tokens_per_step=64)
    neighbours(busy, prompts, 6)
    second = busy.submit(prompt, SAMPLING, MAX_TOKENS)
    busy.run()
    expected = [entry.logprob for entry in idle.stream(first).logprobs]
    assert [entry.logprob for entry in busy.stream(second).logprobs] == pytest.approx(expected, abs=1e-4)
    assert len(expected) == MAX_TOKENS


@QUICK_ON_CPU
def test_n_sequences_equal_n_requests_with_derived_seeds(model_folder, attention, prompt):
    harness = EngineHarness(model_folder, attention=attention)
    together = harness.submit(prompt, SAMPLING, MAX_TOKENS, n=4)
    harness.run()
    outputs = [harness.stream(together, i).tokens for i in range(4)]
    assert len(set(map(tuple, outputs))) == 4
    for i, output in enumerate(outputs):
        seed = derive_seed(SAMPLING.seed, i)
        sampling = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=seed)
        assert harness.generate([prompt], sampling, MAX_TOKENS) == [output]
