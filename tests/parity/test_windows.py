"""Models with sliding windows return transformers' tokens far beyond their window, for any batching and chunking."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from sluice.wire.params import SamplingParams
from tests.engine_worker.models.checkpoints import SIZES, write_checkpoint
from tests.parity.conftest import greedy
from tests.parity.harness import EngineHarness, check_preemptions_change_nothing

MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0)
LENGTHS = (1, 15, 40, 41, 48, 200, 301)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = SIZES | {"num_hidden_layers": 4}
CONFIGS: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**LAYERS, **HEADS, sliding_window=41),
    "qwen2, last layers": Qwen2Config(
        **LAYERS, **HEADS, use_sliding_window=True, sliding_window=20, max_window_layers=2
    ),
    "qwen3, every layer": Qwen3Config(
        **LAYERS, **HEADS, head_dim=16, use_sliding_window=True, sliding_window=48, max_window_layers=0
    ),
    "qwen3, alternating": Qwen3Config(
        **LAYERS,
        **HEADS,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=17,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
    ),
    "qwen3 moe": Qwen3MoeConfig(
        **LAYERS,
        **HEADS,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=41,
    ),
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(SIZES["vocab_size"], (length,), generator=random).tolist() for length in LENGTHS]


@pytest.fixture(scope="module", params=CONFIGS)
def folder_and_expected(request, tmp_path_factory, prompts):
    folder = tmp_path_factory.mktemp("model")
    model = write_checkpoint(folder, CONFIGS[request.param])
    return folder, greedy(model, prompts, MAX_TOKENS)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("attention", "max_tokens_per_step"),
    [
        ("cpu", 48),
        ("reference", 48),
        *(pytest.param("cpu", max_tokens, marks=pytest.mark.long) for max_tokens in (7, 2048)),
    ],
)
def test_outputs_equal_transformers_with_and_without_cached_prefixes(
    folder_and_expected, prompts, attention, max_tokens_per_step
):
    folder, expected = folder_and_expected
    harness = EngineHarness(
        folder, max_batch_size=6, max_tokens_per_step=max_tokens_per_step, kv_cache_tokens=4096, attention=attention
    )
    assert harness.generate(prompts, GREEDY, MAX_TOKENS) == expected
    repeated = [harness.submit(prompt, GREEDY, MAX_TOKENS) for prompt in prompts]
    harness.run()
    assert [harness.stream(number).tokens for number in repeated] == expected
    cached = [harness.cached_tokens(number) for number in repeated]
    assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


@pytest.mark.quick(2)
@pytest.mark.parametrize("tokens_per_block", [1, pytest.param(64, marks=pytest.mark.long)])
def test_outputs_equal_transformers_with_blocks_of_any_size(folder_and_expected, prompts, tokens_per_block):
    folder, expected = folder_and_expected
    harness = EngineHarness(folder, max_batch_size=1, kv_cache_tokens=1024, tokens_per_block=tokens_per_block)
    assert harness.generate(prompts, GREEDY, MAX_TOKENS) == expected


@pytest.mark.quick(2)
def test_preemptions_change_no_token(folder_and_expected, prompts):
    folder, expected = folder_and_expected
    harness = EngineHarness(folder, kv_cache_tokens=224, max_tokens_per_step=64, tokens_per_block=4)
    check_preemptions_change_nothing(harness, prompts[:4], expected[:4])


@pytest.fixture(scope="module")
def mistral(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, CONFIGS["mistral"])


def test_block_use_stays_flat_far_beyond_the_window(mistral, prompts):
    """With a window of 41 tokens, a sequence of 501 needs three or four blocks while it generates."""
    folder, model = mistral
    (expected,) = greedy(model, [prompts[-2]], 300)
    harness = EngineHarness(folder, kv_cache_tokens=128, max_tokens_per_step=64)
    assert harness.generate([prompts[-2]], GREEDY, 300) == [expected]
    used = [step.used_kv_blocks for step in harness.steps]
    assert len(used) == 4 + 299
    assert max(used[:4]) <= 8
    assert set(used[4:-1]) == {3, 4}
    assert used[-1] == 0
    assert harness.pauses == 0


def test_sequences_run_together_although_all_their_tokens_would_not_fit_into_the_pool(mistral, prompts):
    folder, model = mistral
    expected = greedy(model, prompts[-4:], 100)
    harness = EngineHarness(folder, kv_cache_tokens=384, max_tokens_per_step=32, max_batch_size=8)
    assert harness.generate(prompts[-4:], GREEDY, 100) == expected
    assert max(step.generation_requests for step in harness.steps) == 4


def test_a_prefix_needs_only_the_blocks_of_its_last_window_to_be_reused(mistral, prompts):
    """A pool of 128 tokens has evicted the beginning of a prompt of 200."""
    folder, model = mistral
    prompt = prompts[-2]
    expected = greedy(model, [prompt], MAX_TOKENS)
    harness = EngineHarness(folder, kv_cache_tokens=128, max_tokens_per_step=48, max_batch_size=8)
    assert harness.generate([prompt], GREEDY, MAX_TOKENS) == expected
    repeated = harness.submit(prompt, GREEDY, MAX_TOKENS)
    harness.run()
    assert harness.stream(repeated).tokens == expected[0]
    assert harness.cached_tokens(repeated) == 192


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("limits", "layer_types"),
    [
        ((24,), [SLIDING] * 4),
        ((24, 10_000), [SLIDING, FULL] * 2),
        ((10_000, 24, 10_000), [FULL, SLIDING, FULL, FULL]),
    ],
)
def test_max_attention_window_equals_a_model_with_such_windows(tmp_path, prompts, limits, layer_types):
    plain = write_checkpoint(tmp_path, Qwen3Config(**LAYERS, **HEADS, head_dim=16))
    windowed = AutoModelForCausalLM.from_pretrained(
        tmp_path, use_sliding_window=True, sliding_window=24, layer_types=layer_types
    )
    expected = greedy(windowed, prompts[-4:], MAX_TOKENS)
    assert expected != greedy(plain, prompts[-4:], MAX_TOKENS)
    harness = EngineHarness(tmp_path, kv_cache_tokens=8192, max_attention_window=limits)
    assert harness.generate(prompts[-4:], GREEDY, MAX_TOKENS) == expected
