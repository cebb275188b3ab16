"""The n sequences of a request: their prompt is computed once."""

import pytest

from engine_worker.step import MoveKind
from sluice.wire.errors import FinishReason
from sluice.wire.params import derive_seed
from tests.fakes.engine import EngineBench

pytestmark = pytest.mark.usefixtures("both_overlaps")
step_by_step = pytest.mark.parametrize("both_overlaps", [False], ids=[""], indirect=True)
"""For tests of single steps: without overlap only."""


def outputs_are_right(bench: EngineBench, request: int) -> bool:
    n = bench.specs[request, 0].n
    return [bench.output(request, i) for i in range(n)] == [bench.expected(request, i) for i in range(n)]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("size", range(1, 14))
def test_the_prompt_is_computed_once(size, reuse):
    bench = EngineBench(max_tokens_per_step=8, block_reuse=reuse)
    request = bench.submit(range(size), max_tokens=6, n=4, seed=3)
    bench.run()
    assert outputs_are_right(bench, request)
    assert bench.runner.computed == size + 4 * 5
    copies = [move for step in bench.runner.steps for move in step.moves]
    assert len(copies) == (3 if size % 4 else 0)


def test_a_sequence_equals_a_single_request_with_the_derived_seed():
    bench = EngineBench()
    several = bench.submit(range(7), n=4, seed=11)
    single = [bench.submit(range(7), seed=derive_seed(11, i)) for i in range(4)]
    bench.run()
    outputs = [bench.output(several, i) for i in range(4)]
    assert outputs == [bench.output(request) for request in single]
    assert len(set(map(tuple, outputs))) == 4


@step_by_step
def test_shared_blocks_are_held_once():
    bench = EngineBench()
    bench.submit(range(18), max_tokens=6, n=4)
    bench.step()
    bench.step()
    assert bench.engine.stats.latest.used_kv_blocks == 4 + 4


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("num_blocks", [8, 9, 11, 16, 60])
def test_more_sequences_than_fit(num_blocks, reuse):
    bench = EngineBench(num_blocks=num_blocks, max_batch_size=4, block_reuse=reuse)
    request = bench.submit(range(19), max_tokens=13, n=10)
    bench.run()
    assert outputs_are_right(bench, request)


def test_128_sequences_in_a_small_pool():
    bench = EngineBench(num_blocks=12, max_batch_size=8)
    request = bench.submit(range(10), max_tokens=9, n=128)
    bench.run()
    assert outputs_are_right(bench, request)


def test_sequences_without_a_batch_slot_fork_later():
    bench = EngineBench(max_batch_size=2, block_reuse=False)
    request = bench.submit(range(10), max_tokens=6, n=6)
    bench.run()
    assert outputs_are_right(bench, request)
    # The last ones may find no sequence to fork from; without forks each of the five would compute the prompt.
    assert bench.runner.computed < 10 + 6 * 5 + 10 * 5


def test_the_first_sequence_may_end_with_its_first_token():
    """The first token ends sequence 0 before a sibling could fork from it."""
    for reuse in (True, False):
        bench = EngineBench(block_reuse=reuse)
        first = bench.submit(range(10), max_tokens=1)
        bench.run()
        request = bench.submit(range(10), max_tokens=5, n=3, eos_token_ids=(bench.output(first)[0],))
        bench.run()
        assert outputs_are_right(bench, request)
        assert bench.ended(request, 0) is FinishReason.EOS


def test_one_token_each():
    bench = EngineBench()
    request = bench.submit(range(10), max_tokens=1, n=5)
    bench.run()
    assert outputs_are_right(bench, request)


@step_by_step
def test_the_source_of_a_copy_may_end_before_the_copy_is_made():
    """The source ends, and other sequences allocate blocks, before the step that makes the copy."""
    bench = EngineBench(num_blocks=16, max_batch_size=4, max_tokens_per_step=4)
    request = bench.submit(range(6), max_tokens=8, n=4)
    while not (copies := [move for move in bench.cache.tiers.pending if move.kind is MoveKind.COPY]):
        bench.engine._scheduler.schedule(bench.engine.live.active)
        if not bench.cache.tiers.pending:
            bench.step()
    source = bench.engine.live.requests[request].sequences[0]
    assert source.blocks[1] in [move.source for move in copies]
    bench.cancel(request, 0)
    bench.submit(range(40, 60), max_tokens=3)
    bench.run()
    for sequence in (1, 2, 3):
        assert bench.output(request, sequence) == bench.expected(request, sequence)
