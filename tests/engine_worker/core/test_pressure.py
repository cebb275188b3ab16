"""A pool that is too small: which sequences are preempted and resume, and that the tokens are the same."""

import pytest

from engine_worker.request import State
from tests.fakes.engine import EngineBench

pytestmark = pytest.mark.usefixtures("both_overlaps")
step_by_step = pytest.mark.parametrize("both_overlaps", [False], ids=[""], indirect=True)
"""For tests of single steps: without overlap only."""


def paused(bench: EngineBench) -> set[int]:
    return {s.request.submit.request for s in bench.engine.live.active if s.state is State.PREEMPTED}


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
def test_preempted_sequences_resume_with_the_same_tokens(chunked, reuse):
    bench = EngineBench(num_blocks=10, max_batch_size=4, chunked_context=chunked, block_reuse=reuse)
    requests = [bench.submit(range(i, i + 6), max_tokens=24, seed=i) for i in range(5)]
    seen = set()
    while bench.engine.live.requests or bench.inbox:
        bench.step()
        seen |= paused(bench)
    assert seen
    assert all(bench.output(request) == bench.expected(request) for request in requests)


def test_the_last_in_order_is_preempted():
    bench = EngineBench(num_blocks=8, max_batch_size=3)
    bench.submit(range(8), max_tokens=22, request=1, priority=1)
    bench.step()
    bench.submit(range(20, 24), max_tokens=22, request=2, priority=2)
    bench.submit(range(30, 34), max_tokens=22, request=3, priority=2)
    order = []
    while bench.engine.live.requests or bench.inbox:
        bench.step()
        order += sorted(paused(bench) - set(order))
    assert order[:2] == [1, 3]


def test_preempted_sequences_are_not_overtaken():
    bench = EngineBench(num_blocks=10, max_batch_size=3)
    bench.submit(range(8), max_tokens=28, request=1)
    bench.submit(range(20, 36), max_tokens=20, request=2)
    while not paused(bench):
        bench.step()
    bench.submit([1], max_tokens=1, request=3)
    ends = []
    while bench.engine.live.requests or bench.inbox:
        bench.step()
        assert not (paused(bench) and bench.receiver.streams.get((3, 0, 0)))
        ends += [key[0] for key, stream in bench.receiver.streams.items() if stream.end and key[0] not in ends]
    assert ends[0] == 1


@step_by_step
def test_the_first_is_never_preempted_and_every_step_makes_progress():
    bench = EngineBench(num_blocks=9, max_batch_size=6, max_tokens_per_step=8)
    requests = [bench.submit(range(i, i + 5), max_tokens=30, n=2) for i in range(6)]
    while bench.engine.live.requests or bench.inbox:
        before = sum(len(stream.tokens) for stream in bench.receiver.streams.values())
        computed = bench.runner.computed
        first = bench.engine.live.active[:1]
        bench.step()
        assert all(sequence.state in (State.RUNNING, State.ENDED) for sequence in first)
        drawn = sum(len(stream.tokens) for stream in bench.receiver.streams.values()) - before
        assert drawn or bench.runner.computed > computed
    for request in requests:
        for sequence in range(2):
            assert bench.output(request, sequence) == bench.expected(request, sequence)


@pytest.mark.parametrize("budget", [6, 16, 64])
def test_no_thrash(budget):
    """A resumed sequence samples at least one block of tokens before it is preempted again."""
    bench = EngineBench(
        num_blocks=24, tokens_per_block=4, max_batch_size=6, max_tokens_per_step=budget, block_reuse=False
    )
    requests = [bench.submit(range(i, i + 17), max_tokens=40) for i in range(6)]
    resumed_with: dict[int, int] = {}
    while bench.engine.live.requests or bench.inbox:
        before = {s: s.state for s in bench.engine.live.active}
        bench.step()
        for sequence in bench.engine.live.active:
            key = sequence.order[1]
            if before.get(sequence) in (State.PREEMPTED, State.WAITING) and sequence.state is State.RUNNING:
                resumed_with[key] = len(sequence.output)
            elif before.get(sequence) is State.RUNNING and sequence.state is State.PREEMPTED:
                assert len(sequence.output) - resumed_with.get(key, 0) >= 4
    assert all(bench.output(request) == bench.expected(request) for request in requests)


@step_by_step
def test_two_large_requests_run_one_after_the_other():
    bench = EngineBench(num_blocks=10, max_tokens_per_step=8)
    requests = [bench.submit(range(i, i + 36), max_tokens=4) for i in (0, 50)]
    steps = bench.run()
    assert all(bench.output(request) == bench.expected(request) for request in requests)
    assert bench.runner.computed == 2 * (36 + 3)
    assert steps == 2 * (5 + 3)


def test_a_request_that_fills_the_pool_to_the_last_slot():
    bench = EngineBench(num_blocks=8)
    requests = [bench.submit(range(i, i + 20), max_tokens=12) for i in range(3)]
    bench.run()
    assert all(bench.output(request) == bench.expected(request) for request in requests)
