"""A working set of three times the KV cache, revisited: with a host tier next to nothing of it is computed again."""

from sluice import tiny_model
from sluice.ring.params import SamplingParams
from tests.parity.harness import EngineHarness

POOL_TOKENS = 640
ROUNDS = 3


def revisit(prompts: list[list[int]], kv_host_memory: int) -> tuple[int, list[list[int]]]:
    """Prompt tokens computed after the first round, and all outputs."""
    harness = EngineHarness(
        tiny_model.path(), kv_cache_tokens=POOL_TOKENS, kv_host_memory=kv_host_memory, max_tokens_per_step=256
    )
    outputs, computed = [], 0
    for round_ in range(ROUNDS):
        for i, prompt in enumerate(prompts):
            number = harness.submit(prompt, SamplingParams(seed=i), 8)
            harness.run()
            outputs.append(harness.stream(number).tokens)
            computed += (len(prompt) - harness.cached_tokens(number)) if round_ else 0
    return computed, outputs


def test_the_host_tier_saves_the_work_and_changes_no_text(prompts):
    working_set = [prompt[:240] for prompt in prompts if len(prompt) >= 240][:8]
    assert sum(map(len, working_set)) == 3 * POOL_TOKENS
    without, expected = revisit(working_set, 0)
    tier, outputs = revisit(working_set, 64 << 20)
    assert without == (ROUNDS - 1) * 3 * POOL_TOKENS
    assert tier <= 0.2 * without
    assert outputs == expected
