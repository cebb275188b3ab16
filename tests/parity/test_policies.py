"""No capacity policy and no chunking policy changes the tokens of a request.

With the tiny model and a small pool, which holds three or four requests until their end.
"""

import pytest

from sluice import tiny_model
from sluice.wire.params import SamplingParams
from tests.parity.harness import EngineHarness

POOL = {"kv_cache_tokens": 200, "tokens_per_block": 2, "max_batch_size": 32, "max_tokens_per_step": 32}
MAX_TOKENS = [45 + 13 * i % 24 for i in range(40)]
PROMPT_LENGTHS = (2, 7, 6, 5, 4, 3, 8, 2)


@pytest.fixture(scope="module")
def requests(prompts) -> list[tuple[list[int], SamplingParams]]:
    """40 requests of eight different kinds."""
    kinds = [
        (prompts[20 + kind][:length], SamplingParams(seed=kind, temperature=0.8))
        for kind, length in enumerate(PROMPT_LENGTHS)
    ]
    return [kinds[i % len(kinds)] for i in range(len(MAX_TOKENS))]


@pytest.fixture(scope="module")
def alone(requests) -> list[list[int]]:
    """The output of each request on an otherwise idle engine."""
    harness = EngineHarness(tiny_model.path(), kv_cache_tokens=1024)
    kinds = [
        harness.generate([prompt], sampling, max(MAX_TOKENS))[0] for prompt, sampling in requests[: len(PROMPT_LENGTHS)]
    ]
    return [kinds[i % len(kinds)][:max_tokens] for i, max_tokens in enumerate(MAX_TOKENS)]


def run_together(requests, alone, policy: str, chunking: str) -> EngineHarness:
    harness = EngineHarness(tiny_model.path(), policy=policy, chunking=chunking, **POOL)
    # Different salts, so that equal requests share no blocks.
    numbers = [
        harness.submit(prompt, sampling, max_tokens, salt=str(i))
        for i, ((prompt, sampling), max_tokens) in enumerate(zip(requests, MAX_TOKENS, strict=False))
    ]
    harness.run()
    assert harness.requests.keys() == set(numbers)
    assert [harness.stream(number).tokens for number in numbers] == alone[: len(numbers)]
    return harness


def empty_slots(harness: EngineHarness) -> int:
    return max(step.empty_generation_slots for step in harness.steps)


@pytest.mark.long
@pytest.mark.parametrize("chunking", ["first_come_first_served", "equal_progress"])
def test_max_utilization_preempts_often_and_changes_no_token(requests, alone, chunking):
    harness = run_together(requests, alone, "max_utilization", chunking)
    assert harness.pauses >= 50
    assert min(step.free_kv_blocks for step in harness.steps) < 10
    assert empty_slots(harness) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "chunking", "leaves_slots_empty"),
    [
        ("guaranteed_no_evict", "first_come_first_served", False),
        ("static_batch", "equal_progress", True),
    ],
)
def test_policies_that_reserve_memory_never_preempt(requests, alone, policy, chunking, leaves_slots_empty):
    harness = run_together(requests[:16], alone, policy, chunking)
    assert harness.pauses == 0
    assert max(step.active_requests for step in harness.steps) > 12
    assert max(step.scheduled_requests for step in harness.steps) < 8
    assert (empty_slots(harness) > 0) == leaves_slots_empty


@pytest.mark.quick(1)
@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict", "static_batch"])
def test_chunking_policies_split_contexts_differently(prompts, policy):
    """With four long prompts, one policy completes them one after the other, and the other one serves all equally."""
    greedy = SamplingParams(temperature=0.0)
    long = [prompt[:100] for prompt in prompts if len(prompt) >= 100][:4]
    idle = EngineHarness(tiny_model.path(), kv_cache_tokens=1024)
    alone = [idle.generate([prompt], greedy, 4)[0] for prompt in long]
    first_tokens = []
    for chunking in ("first_come_first_served", "equal_progress"):
        harness = EngineHarness(
            tiny_model.path(), policy=policy, chunking=chunking, kv_cache_tokens=1024, max_tokens_per_step=64
        )
        assert harness.generate(long, greedy, 4) == alone
        assert sum(step.context_requests for step in harness.steps) > len(long)
        first_tokens.append(next(i for i, step in enumerate(harness.steps) if step.generation_requests))
    assert first_tokens[0] < first_tokens[1]
