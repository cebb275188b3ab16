"""Greedy output is that of transformers, token for token, however the work is cut."""

import pytest

from sluice.ring.params import SamplingParams
from tests.parity.conftest import greedy_oracle
from tests.parity.harness import EngineHarness

pytestmark = pytest.mark.timeout(600)
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def expected(model_folder, prompts):
    return greedy_oracle(model_folder, prompts, MAX_TOKENS)


@pytest.mark.parametrize(("at_a_time", "max_tokens_per_step", "count"), [(1, 2048, 20), (32, 2048, 50), (32, 48, 50)])
def test_cold_and_cached_equal_transformers(model_folder, prompts, expected, at_a_time, max_tokens_per_step, count):
    prompts, expected = prompts[:count], expected[:count]
    harness = EngineHarness(model_folder, max_batch_size=at_a_time, max_tokens_per_step=max_tokens_per_step)
    assert harness.generate(prompts, GREEDY, MAX_TOKENS) == expected
    again = [harness.submit(prompt, GREEDY, MAX_TOKENS) for prompt in prompts]
    harness.run()
    assert [harness.stream(number).tokens for number in again] == expected
    cached = [harness.cached_tokens(number) for number in again]
    assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


def test_the_reference_backend_agrees(model_folder, prompts, expected):
    harness = EngineHarness(model_folder, attention="reference", max_tokens_per_step=200)
    assert harness.generate(prompts[:12], GREEDY, MAX_TOKENS) == expected[:12]


def test_a_pool_too_small_pauses_and_changes_nothing(model_folder, prompts, expected):
    harness = EngineHarness(model_folder, kv_cache_tokens=1024, max_tokens_per_step=256)
    assert harness.generate(prompts, GREEDY, MAX_TOKENS) == expected
