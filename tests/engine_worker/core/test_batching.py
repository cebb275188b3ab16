"""Which sequences and tokens a step has: budgets, chunks, order."""

import pytest
from msgspec.structs import replace

from sluice.wire.stats import StepStats
from tests.fakes.engine import EngineBench

pytestmark = pytest.mark.usefixtures("both_overlaps")
step_by_step = pytest.mark.parametrize("both_overlaps", [False], ids=[""], indirect=True)
"""For tests of single steps: without overlap only."""


def sizes(bench: EngineBench) -> list[list[int]]:
    """Number of tokens of each slice of each step."""
    return [[len(part.tokens) for part in step.slices] for step in bench.runner.steps]


@pytest.mark.parametrize("budget", range(1, 24))
def test_chunk_edges_do_not_change_the_output(budget):
    bench = EngineBench(max_batch_size=1, max_tokens_per_step=budget)
    request = bench.submit(range(21), max_tokens=4)
    bench.run()
    assert bench.output(request) == bench.expected(request)
    *chunks, last, _, _, _ = [sum(step) for step in sizes(bench)]
    assert set(chunks) <= {budget // 4 * 4 or budget}
    assert 1 <= last <= budget
    assert sum(chunks) + last == 21


@pytest.mark.parametrize("first", range(1, 12))
def test_chunk_edges_with_a_prefix_in_the_cache(first):
    """All splits of a prompt into a part that is cached and chunks of three tokens."""
    bench = EngineBench(max_batch_size=1, max_tokens_per_step=3)
    bench.submit(range(first), max_tokens=1)
    request = bench.submit(range(12), max_tokens=5)
    bench.run()
    assert bench.output(request) == bench.expected(request)
    assert bench.receiver.opens[request, 0].cached_tokens == first // 4 * 4


def test_generation_runs_first_and_context_fills_the_rest_of_the_budget():
    bench = EngineBench(max_batch_size=4, max_tokens_per_step=8)
    bench.submit([1, 2], max_tokens=6)
    bench.step()
    bench.submit(range(10, 30), max_tokens=3)
    bench.submit(range(40, 45), max_tokens=3)
    bench.run()
    assert sizes(bench)[:6] == [[2], [1, 4], [1, 4], [1, 4], [1, 4], [1, 4]]
    assert sizes(bench)[6:9] == [[1, 5], [1, 1], [1]]


@step_by_step
def test_a_context_of_higher_priority_is_served_first():
    bench = EngineBench(max_batch_size=4, max_tokens_per_step=8)
    bench.submit(range(20), max_tokens=1, priority=1)
    bench.step()
    bench.submit(range(40, 52), max_tokens=1, priority=3)
    bench.run()
    assert sizes(bench) == [[8], [8], [4, 4], [8]]
    assert [step.slices[0].tokens[0] for step in bench.runner.steps] == [0, 40, 48, 12]


@step_by_step
def test_statistics_of_a_step():
    bench = EngineBench(max_batch_size=3, max_tokens_per_step=8, max_requests=5)
    bench.submit([1, 2], max_tokens=6)
    bench.step()
    bench.submit(range(10, 30), max_tokens=3)
    for _ in range(3):
        bench.submit(range(40, 45), max_tokens=3)
    bench.step()
    assert replace(bench.engine.stats.latest, time=0.0) == StepStats(
        iteration=2,
        active_requests=5,
        max_requests=5,
        queued_requests=2,
        scheduled_requests=2,
        context_requests=1,
        generation_requests=1,
        total_context_tokens=4,
        max_kv_blocks=64,
        free_kv_blocks=64 - 1 - 5 - 2,
        used_kv_blocks=8,
        tokens_per_kv_block=4,
        tokens_per_second=2.0,
    )


def test_without_chunking_a_context_waits_until_all_of_it_fits():
    bench = EngineBench(max_batch_size=4, max_tokens_per_step=8, chunked_context=False)
    requests = [bench.submit(range(at, at + size), max_tokens=3) for at, size in [(0, 5), (20, 5), (40, 3), (60, 2)]]
    bench.run()
    assert sizes(bench)[:3] == [[5], [1, 5], [1, 1, 3, 2]]
    assert all(bench.output(request) == bench.expected(request) for request in requests)


def test_without_chunking_a_context_over_the_budget_runs_when_it_is_first():
    bench = EngineBench(max_batch_size=4, max_tokens_per_step=8, chunked_context=False)
    short = bench.submit([1], max_tokens=4)
    long = bench.submit(range(30), max_tokens=2)
    after = bench.submit([2, 3], max_tokens=2)
    bench.run()
    assert sizes(bench)[:3] == [[1], [1, 30], [1, 1, 2]]
    assert all(bench.output(request) == bench.expected(request) for request in (short, long, after))


def test_max_batch_size_is_respected():
    bench = EngineBench(max_batch_size=3)
    requests = [bench.submit([i, i + 1], max_tokens=3) for i in range(8)]
    bench.run()
    assert max(map(len, sizes(bench))) == 3
    assert all(bench.output(request) == bench.expected(request) for request in requests)


def test_order_is_by_priority_then_arrival():
    bench = EngineBench(max_batch_size=1)
    running = bench.submit([1], max_tokens=5)
    bench.step()
    low = bench.submit([2], max_tokens=1, priority=1)
    normal = bench.submit([3], max_tokens=1)
    normal_later = bench.submit([4], max_tokens=1)
    high = bench.submit([5], max_tokens=1, priority=3)
    order = []
    while bench.engine.live.requests or bench.inbox:
        bench.step()
        order += [key[0] for key, stream in bench.receiver.streams.items() if stream.end and key[0] not in order]
    assert order == [running, high, normal, normal_later, low]


@pytest.mark.parametrize(("size", "tokens"), [(0, 8), (9, 8)])
def test_a_batch_that_would_starve_contexts_is_refused(size, tokens):
    with pytest.raises(ValueError, match="max_batch_size must be from 1 to max_tokens_per_step"):
        EngineBench(max_batch_size=size, max_tokens_per_step=tokens)


def test_requests_in_flight_are_left_out():
    bench = EngineBench()
    bench.submit([1], request=11)
    bench.submit([2], request=12)
    bench.step()
    _, generation = bench.engine._scheduler._micro_batch.schedule(bench.engine.live.active, {11})
    assert [sequence.request.submit.request for sequence in generation] == [12]
