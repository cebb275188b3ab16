"""Greedy outputs equal those of transformers, for any batching and chunking."""

import pytest

from sluice.wire.params import SamplingParams
from tests.parity.conftest import greedy_oracle
from tests.parity.harness import EngineHarness, check_preemptions_change_nothing

pytestmark = pytest.mark.timeout(600)
MAX_TOKENS = 16
COUNT = 30
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def expected(model_folder, prompts):
    return greedy_oracle(model_folder, prompts[:COUNT], MAX_TOKENS)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("max_batch_size", "max_tokens_per_step", "count"),
    [*(pytest.param(*each, marks=pytest.mark.long) for each in ((1, 2048, 12), (32, 2048, COUNT))), (32, 48, COUNT)],
)
def test_outputs_equal_transformers_with_and_without_cached_prefixes(
    model_folder, prompts, expected, max_batch_size, max_tokens_per_step, count
):
    prompts, expected = prompts[:count], expected[:count]
    harness = EngineHarness(model_folder, max_batch_size=max_batch_size, max_tokens_per_step=max_tokens_per_step)
    assert harness.generate(prompts, GREEDY, MAX_TOKENS) == expected
    repeated = [harness.submit(prompt, GREEDY, MAX_TOKENS) for prompt in prompts]
    harness.run()
    assert [harness.stream(number).tokens for number in repeated] == expected
    cached = [harness.cached_tokens(number) for number in repeated]
    assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


def test_the_reference_backend_agrees(model_folder, prompts, expected):
    harness = EngineHarness(model_folder, attention="reference", max_tokens_per_step=200)
    assert harness.generate(prompts[:12], GREEDY, MAX_TOKENS) == expected[:12]


def test_preemptions_change_no_token(model_folder, prompts, expected):
    harness = EngineHarness(model_folder, kv_cache_tokens=192, max_tokens_per_step=64, tokens_per_block=4)
    check_preemptions_change_nothing(harness, prompts[:5], expected[:5], copies=8)
