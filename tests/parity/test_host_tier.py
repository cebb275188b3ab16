"""With a host tier, a working set of three times the KV cache can be revisited almost without computing it again."""

from sluice import tiny_model
from sluice.wire.params import SamplingParams
from tests.parity.harness import EngineHarness

POOL_TOKENS = 640
ROUNDS = 3


def revisit(prompts: list[list[int]], kv_host_memory: int) -> tuple[int, list[list[int]]]:
    """Send all prompts in several rounds. Returns the prompt tokens computed after the first, and all outputs."""
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


def test_the_host_tier_saves_computation_and_changes_no_token(prompts):
    working_set = [prompt[:240] for prompt in prompts if len(prompt) >= 240][:8]
    assert sum(map(len, working_set)) == 3 * POOL_TOKENS
    computed_without, expected = revisit(working_set, 0)
    computed_with, outputs = revisit(working_set, 64 << 20)
    assert computed_without == (ROUNDS - 1) * 3 * POOL_TOKENS
    assert computed_with <= 0.2 * computed_without
    assert outputs == expected
