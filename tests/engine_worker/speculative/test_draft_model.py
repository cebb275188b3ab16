"""The engine with a scripted draft model, which checks that it has computed everything that it reads."""

import pytest

from engine_worker.speculative.draft_model import MAX_FAILURES
from engine_worker.step import DeviceLostError, MoveKind
from sluice.wire.params import Speculation
from tests.fakes.engine import EngineBench, spec_of
from tests.fakes.scripted_tokens import continuation

PROMPT = [3 * i % 97 for i in range(22)]
DRAFTS = Speculation(max_draft_tokens=3)


def bench_of(**options) -> EngineBench:
    return EngineBench(**{"draft_context": 1000, "tokens_per_block": 8, "num_blocks": 32, **options})


def generate(bench: EngineBench, prompt=PROMPT, max_tokens: int = 30, **fields) -> int:
    """Run a request and check its output; returns its number."""
    number = len(bench.specs) + 1
    spec = spec_of(prompt, max_tokens, request=number, seed=number, speculation=DRAFTS, **fields)
    bench.send(spec)
    bench.run()
    assert bench.output(number) == continuation(prompt, spec.stopping, number)
    return number


def test_most_draft_tokens_are_accepted():
    bench = bench_of()
    generate(bench)
    stats = bench.engine.stats
    assert stats.accepted_draft_tokens > 0.6 * stats.draft_tokens > 10


def test_each_token_is_computed_once_unless_a_draft_was_rejected():
    bench = bench_of()
    generate(bench)
    stats, drafter = bench.engine.stats, bench.runner.drafter
    wrong = stats.draft_tokens - stats.accepted_draft_tokens
    assert drafter.computed <= len(PROMPT) + 30 + wrong


def test_a_cached_prefix_includes_the_draft_models_part():
    bench = bench_of()
    generate(bench, [*PROMPT, 1])
    before = bench.runner.drafter.computed
    generate(bench, [*PROMPT, 2], max_tokens=5)
    assert bench.runner.drafter.computed - before < len(PROMPT)


def test_the_draft_model_computes_a_prefix_that_it_missed():
    bench = bench_of()
    bench.send(spec_of([*PROMPT, 1], 5, request=1, speculation=Speculation(max_draft_tokens=0)))
    bench.run()
    assert bench.runner.drafter.computed == 0
    generate(bench, [*PROMPT, 2])
    assert bench.runner.drafter.computed > len(PROMPT)


def test_host_memory_keeps_the_blocks_of_the_draft_model():
    bench = bench_of(num_blocks=8, num_host_blocks=16, block_reuse=True)
    generate(bench, [*PROMPT, 1])
    for other in range(40, 43):
        generate(bench, [other] * 40, max_tokens=8)
    before = bench.runner.drafter.computed
    generate(bench, [*PROMPT, 2], max_tokens=5)
    moves = [move.kind for step in bench.runner.steps for move in step.moves]
    assert MoveKind.ONLOAD in moves
    assert bench.runner.drafter.computed - before < len(PROMPT)


def test_a_long_prompt_is_computed_in_several_steps():
    bench = bench_of(max_tokens_per_step=16, max_batch_size=4, num_blocks=40)
    generate(bench, list(range(90)))
    sizes = [sum(len(part.tokens) for part in step.slices) for step in bench.runner.drafter.steps]
    assert max(sizes) == 16
    assert bench.engine.stats.accepted_draft_tokens > 0


def test_the_draft_model_does_not_exceed_its_context():
    bench = bench_of(draft_context=40)
    generate(bench, max_tokens=40)
    ends = [part.start + len(part.tokens) for step in bench.runner.drafter.steps for part in step.slices]
    assert 30 < max(ends) <= 40


def test_the_draft_model_is_not_used_in_large_batches():
    bench = bench_of(max_draft_batch=1)
    for number in (1, 2):
        bench.send(spec_of(PROMPT, 9, request=number, speculation=DRAFTS))
    bench.run()
    assert bench.runner.drafter.steps == []


def test_what_the_caller_expects_is_drafted_first():
    bench = bench_of()
    stopping = spec_of(PROMPT, 20).stopping
    expected = tuple(continuation(PROMPT, stopping, 1))
    bench.send(spec_of(PROMPT, 20, request=1, seed=1, speculation=Speculation(3, expected)))
    bench.run()
    assert bench.runner.drafter.steps == []
    assert bench.engine.stats.accepted_draft_tokens > 10


def test_a_failure_ends_no_request():
    bench = bench_of()
    for _ in range(MAX_FAILURES + 2):
        bench.runner.fail_drafting = True
        generate(bench)
    assert bench.runner.failures == MAX_FAILURES + 2
    assert bench.engine.stats.accepted_draft_tokens > 10


def test_the_draft_model_is_no_longer_used_after_repeated_failures():
    bench = bench_of()
    bench.runner.draft = _fail(bench.runner)
    generate(bench)
    assert bench.runner.failures == MAX_FAILURES


def _fail(runner):
    def draft(_):
        runner.failures += 1
        raise RuntimeError("out of luck")

    return draft


def test_a_lost_device_ends_the_engine():
    bench = bench_of()
    bench.runner.fail_drafting = bench.runner.lost = True
    bench.send(spec_of(PROMPT, 9, request=1, speculation=DRAFTS))
    with pytest.raises(DeviceLostError):
        bench.run()
