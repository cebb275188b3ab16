"""Outputs of the OpenVINO backend equal those of transformers, for any batching and chunking."""

import pytest
import torch

from sluice import tiny_model
from sluice.wire.params import SamplingParams, StopParams
from tests.engine_worker.models.checkpoints import SIZES, write_checkpoint
from tests.parity.conftest import greedy, greedy_oracle
from tests.parity.harness import EngineHarness
from tests.parity.test_windows import CONFIGS

pytest.importorskip("openvino")
pytestmark = pytest.mark.timeout(600)
MAX_TOKENS = 16
COUNT = 30
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def expected(model_folder, prompts):
    return greedy_oracle(model_folder, prompts[:COUNT], MAX_TOKENS)


@pytest.mark.one_quick_model
@pytest.mark.parametrize(
    ("max_batch_size", "max_tokens_per_step", "overlap"),
    [*(pytest.param(*each, marks=pytest.mark.long) for each in ((1, 512, False), (32, 48, False))), (32, 2048, True)],
)
def test_outputs_equal_transformers_with_and_without_cached_prefixes(
    model_folder, prompts, expected, max_batch_size, max_tokens_per_step, overlap
):
    harness = EngineHarness(
        model_folder,
        backend="openvino",
        max_batch_size=max_batch_size,
        max_tokens_per_step=max_tokens_per_step,
        overlap=overlap,
    )
    # Running prompts one at a time is slow, so there are fewer of them.
    prompts = prompts[: COUNT if max_batch_size > 1 else 12]
    expected = expected[: len(prompts)]
    assert harness.generate(prompts, GREEDY, MAX_TOKENS) == expected
    repeated = [harness.submit(prompt, GREEDY, MAX_TOKENS) for prompt in prompts]
    harness.run()
    assert [harness.stream(number).tokens for number in repeated] == expected
    # At least two tokens of a prompt are computed: a single one would get the bits of a generated token.
    assert [harness.cached_tokens(number) for number in repeated] == [max(0, len(p) - 2) // 32 * 32 for p in prompts]


@pytest.mark.quick(1)
def test_preemptions_and_blocks_from_host_memory_change_no_token(model_folder, prompts, expected):
    harness = EngineHarness(
        model_folder, backend="openvino", kv_cache_tokens=512, kv_host_memory=64 << 20, max_tokens_per_step=256
    )
    assert harness.generate(prompts[6:24], GREEDY, MAX_TOKENS) == expected[6:24]
    # Later requests have filled the pool, so the blocks of this prompt were in host memory.
    repeated = harness.submit(prompts[10], GREEDY, MAX_TOKENS)
    harness.run()
    assert harness.stream(repeated).tokens == expected[10]
    assert harness.cached_tokens(repeated) == (len(prompts[10]) - 1) // 32 * 32 > 0


@pytest.mark.parametrize("policy", ["max_utilization", pytest.param("guaranteed_no_evict", marks=pytest.mark.long)])
def test_capacity_policies_change_no_token(prompts, policy):
    """In a pool that holds only a few of the requests. Forks share the prompt's blocks and copy the last one."""
    specs = [(prompts[20 + i][: 3 + 11 * i % 50], SamplingParams(seed=i, temperature=0.8)) for i in range(8)]

    def streams(harness: EngineHarness) -> list[list[int]]:
        numbers = [harness.submit(prompt, sampling, 24, n=2) for prompt, sampling in specs]
        harness.run()
        return [harness.stream(number, i).tokens for number in numbers for i in range(2)]

    alone = EngineHarness(tiny_model.path(), backend="openvino", max_batch_size=2)
    expected = streams(alone)
    together = EngineHarness(
        tiny_model.path(),
        backend="openvino",
        policy=policy,
        kv_cache_tokens=480,
        max_tokens_per_step=48,
        max_batch_size=16,
    )
    assert streams(together) == expected


@pytest.mark.quick(1)
def test_a_request_resumes_on_another_engine(model_folder, prompts):
    options = {"sampling": SamplingParams(seed=5), "stopping": StopParams(24)}
    first = EngineHarness(model_folder, backend="openvino")
    number = first.send(prompts[12][:70], **options)
    first.run()
    tokens = first.stream(number).tokens
    for count in (1, 11, 23):
        second_engine = EngineHarness(model_folder, backend="openvino", max_tokens_per_step=32, max_batch_size=8)
        number = second_engine.send(prompts[12][:70], resume={0: tokens[:count]}, **options)
        second_engine.run()
        assert second_engine.stream(number).tokens == tokens


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["mistral", "qwen2, last layers", "qwen3, alternating"])
def test_attention_windows_equal_transformers(tmp_path, name):
    random = torch.Generator().manual_seed(3)
    lengths = (1, 40, 41, 48, 301)
    windowed = [torch.randint(SIZES["vocab_size"], (length,), generator=random).tolist() for length in lengths]
    expected = greedy(write_checkpoint(tmp_path, CONFIGS[name]), windowed, MAX_TOKENS)
    for max_tokens_per_step in (48, 2048):
        harness = EngineHarness(
            tmp_path,
            backend="openvino",
            max_batch_size=8,
            max_tokens_per_step=max_tokens_per_step,
            kv_cache_tokens=2048,
        )
        assert harness.generate(windowed, GREEDY, MAX_TOKENS) == expected
