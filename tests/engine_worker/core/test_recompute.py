"""With a runner of exact kernels, generated tokens are computed again in the shape in which they were generated."""

import pytest

from tests.fakes.engine import EngineBench

PROMPT = list(range(1, 10))


def slices(bench: EngineBench) -> list[tuple[int, int, bool]]:
    """(start, number of tokens, `separate`) of each slice."""
    return [(part.start, len(part.tokens), part.separate) for step in bench.runner.steps for part in step.slices]


def resumed(prompt=PROMPT, outputs=(11, 12, 13, 14, 15), *, max_tokens=6, **options) -> list[tuple[int, int, bool]]:
    bench = EngineBench(**options)
    bench.submit(prompt, max_tokens, resume={0: list(outputs)})
    bench.run()
    return slices(bench)


def test_a_chunk_ends_at_the_end_of_the_prompt_and_separate_tokens_follow():
    assert resumed(exact=True, separates=True) == [(0, 9, False), (9, 5, True)]


def test_generated_tokens_follow_one_by_one_if_the_kernels_cannot_separate_them():
    assert resumed(exact=True) == [(0, 9, False), *((9 + i, 1, False) for i in range(5))]


@pytest.mark.parametrize("options", [{}, {"exact": True, "separates": True, "recompute": "fast"}])
def test_the_fast_way_computes_them_with_the_prompt(options):
    assert resumed(**options) == [(0, 14, False)]


def test_kernels_that_are_not_exact_compute_one_by_one_on_request():
    assert resumed(recompute="exact")[1:] == [(9 + i, 1, False) for i in range(5)]


@pytest.mark.parametrize("policy", ["first_come_first_served", "equal_progress"])
def test_a_chunk_leaves_no_single_token_of_a_prompt(policy):
    """Budgets of two blocks: the second chunk would end one token before the end of the prompt."""
    chunks = resumed(
        list(range(1, 18)), [], max_tokens=1, exact=True, max_tokens_per_step=8, context_chunking_policy=policy
    )
    assert [size for _, size, _ in chunks] == [8, 4, 5]


@pytest.mark.parametrize(
    ("policy", "first", "budget"),
    [("first_come_first_served", 9, 13), ("equal_progress", 5, 9), ("equal_progress", 5, 8)],
)
def test_a_prompt_that_does_not_fit_waits_rather_than_end_within_a_block(policy, first, budget):
    """u8 keys of a block are quantized together."""
    bench = EngineBench(exact=True, max_tokens_per_step=budget, context_chunking_policy=policy)
    for start, size in ((20, first), (40, 5)):
        bench.submit(list(range(start, start + size)), 1)
    bench.run()
    assert slices(bench) == [(0, first, False), (0, 5, False)]


def test_a_cached_prefix_leaves_no_single_token_of_a_prompt():
    bench = EngineBench(exact=True)
    for _ in range(2):
        bench.submit(PROMPT, 1)
        bench.run()
    assert slices(bench) == [(0, 9, False), (4, 5, False)]


@pytest.mark.parametrize(("recompute", "start"), [("auto", 8), ("fast", 12)])
def test_blocks_with_generated_tokens_serve_the_same_stream_and_not_a_prompt(recompute, start):
    bench = EngineBench(exact=True, recompute=recompute)
    bench.submit(PROMPT, 6)
    bench.run()
    output = bench.receiver.streams[1, 0, 0].tokens
    bench.submit(PROMPT, 6, resume={0: output[:-1]})
    bench.run()
    assert slices(bench)[-1][0] >= 12
    bench.submit(PROMPT + output, 1)
    bench.run()
    assert slices(bench)[-1][0] == start
