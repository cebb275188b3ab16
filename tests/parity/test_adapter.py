"""Models that run through the transformers adapter return transformers' tokens, also in batches, chunks and beyond
their windows."""

from pathlib import Path

import pytest
import torch

from sluice.wire.params import SamplingParams
from tests.engine_worker.models.checkpoints import write_checkpoint
from tests.engine_worker.models.foreign import ADAPTED, WINDOWED
from tests.parity.conftest import greedy
from tests.parity.harness import EngineHarness, check_preemptions_change_nothing

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


@pytest.mark.quick(5)
@pytest.mark.parametrize(("max_tokens_per_step", "overlap"), [(2048, False), (13, True)])
def test_outputs_equal_transformers_with_and_without_cached_prefixes(case, prompts, max_tokens_per_step, overlap):
    _, folder, expected = case
    harness = EngineHarness(
        folder, max_batch_size=4, max_tokens_per_step=max_tokens_per_step, kv_cache_tokens=2048, overlap=overlap
    )
    assert harness.generate(prompts, GREEDY, MAX_TOKENS) == expected
    repeated = [harness.submit(prompt, GREEDY, MAX_TOKENS) for prompt in prompts]
    harness.run()
    assert [harness.stream(number).tokens for number in repeated] == expected
    cached = [harness.cached_tokens(number) for number in repeated]
    assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


@pytest.mark.quick(3)
def test_preemptions_change_no_token(case, prompts):
    _, folder, expected = case
    harness = EngineHarness(folder, kv_cache_tokens=256, max_tokens_per_step=64)
    check_preemptions_change_nothing(harness, prompts[:4], expected[:4])


@pytest.mark.quick(3)
def test_blocks_behind_the_window_are_released(case, prompts):
    name, folder, _ = case
    harness = EngineHarness(folder, kv_cache_tokens=1024, max_tokens_per_step=64)
    harness.generate(prompts[-1:], GREEDY, MAX_TOKENS)
    most_blocks = max(step.used_kv_blocks for step in harness.steps[-MAX_TOKENS:])
    windows = WINDOWED.get(name)
    in_all_layers = windows is not None and "full_attention" not in (getattr(windows, "layer_types", None) or [])
    assert most_blocks <= 3 if in_all_layers else most_blocks >= 13
