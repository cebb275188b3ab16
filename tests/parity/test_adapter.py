"""Architectures without a class of our own give the tokens of transformers, beyond their windows and however the work
is cut."""

from pathlib import Path

import pytest
import torch

from sluice.ring.params import SamplingParams
from tests.engine_worker.models.checkpoints import write_checkpoint
from tests.engine_worker.models.foreign import ADAPTED, WINDOWED
from tests.parity.conftest import greedy
from tests.parity.harness import EngineHarness

MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0)
LENGTHS = (1, 15, 20, 48, 200)
NAMES = ["cohere2", "gemma3", "gpt2", "gpt neox", "granite", "mixtral", "olmo3", "opt", "phi", "phi3", "starcoder2"]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(97, (length,), generator=random).tolist() for length in LENGTHS]


@pytest.fixture(scope="module", params=NAMES)
def case(request, tmp_path_factory, prompts) -> tuple[str, Path, list[list[int]]]:
    folder = tmp_path_factory.mktemp("model")
    model = write_checkpoint(folder, ADAPTED[request.param])
    return request.param, folder, greedy(model, prompts, MAX_TOKENS)


@pytest.mark.parametrize(("max_tokens_per_step", "overlap"), [(2048, False), (13, True)])
def test_cold_and_cached_equal_transformers(case, prompts, max_tokens_per_step, overlap):
    _, folder, expected = case
    harness = EngineHarness(
        folder, max_batch_size=4, max_tokens_per_step=max_tokens_per_step, kv_cache_tokens=2048, overlap=overlap
    )
    assert harness.generate(prompts, GREEDY, MAX_TOKENS) == expected
    again = [harness.submit(prompt, GREEDY, MAX_TOKENS) for prompt in prompts]
    harness.run()
    assert [harness.stream(number).tokens for number in again] == expected
    cached = [harness.cached_tokens(number) for number in again]
    assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


def test_a_pool_too_small_pauses_and_changes_nothing(case, prompts):
    _, folder, expected = case
    harness = EngineHarness(folder, kv_cache_tokens=256, max_tokens_per_step=64)
    assert harness.generate(prompts, GREEDY, MAX_TOKENS) == expected


def test_blocks_behind_the_window_are_given_back(case, prompts):
    name, folder, _ = case
    harness = EngineHarness(folder, kv_cache_tokens=1024, max_tokens_per_step=64)
    harness.generate(prompts[-1:], GREEDY, MAX_TOKENS)
    most = max(step.used_kv_blocks for step in harness.steps[-MAX_TOKENS:])
    windows = WINDOWED.get(name)
    everywhere = windows is not None and "full_attention" not in (getattr(windows, "layer_types", None) or [])
    assert most <= 3 if everywhere else most >= 13
