"""The defining property of each policy, with random requests."""

from operator import attrgetter

from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.engine_worker.scheduling.workloads import arrivals, bench_of, play, sizes
from tests.examples import examples

ORDER = attrgetter("order")
POLICIES = ("max_utilization", "guaranteed_no_evict", "static_batch")
many = examples(60, suppress_health_check=list(HealthCheck))


def all_get_what_fits(bench):
    """Check in every step that all sequences which the policy calls fitting are allocated their blocks."""
    hold = bench.engine._scheduler._hold

    def holding(fitting):
        allocated = hold(fitting)
        assert allocated == fitting
        return allocated

    bench.engine._scheduler._hold = holding


@many
@given(arrivals, sizes)
def test_max_utilization_runs_the_first_and_preempts_from_the_end(arrivals, sizes):
    paused_now = set()

    def look(active, before, fitting, paused):
        assert fitting == sorted(fitting, key=ORDER)
        paused_now.difference_update(fitting)
        paused_now.update(paused)
        if paused:
            assert set(fitting) | set(paused) == set(before)
            assert min(map(ORDER, paused)) > max(map(ORDER, fitting))

    bench = bench_of("max_utilization", sizes, look)
    all_get_what_fits(bench)
    schedule = bench.engine._scheduler.schedule

    def looking(active, *arguments):
        holders = [sequence for sequence in active if sequence.blocks]
        scheduled = schedule(active, *arguments)
        if active:
            first = min(bench.cache.holders, key=ORDER)
            assert first in scheduled.generation or first in [chunk.sequence for chunk in scheduled.context]
            assert not holders or holders[0].blocks
        return scheduled

    bench.engine._scheduler.schedule = looking
    play(bench, arrivals)
    assert all(arrivals[s.request.submit.request - 1].cancelled_after is not None for s in paused_now)


@many
@given(arrivals, sizes)
def test_guaranteed_no_evict_keeps_the_memory_of_begun_requests(arrivals, sizes):
    begun = set()

    def look(active, before, fitting, paused):
        assert paused == []
        assert set(before) <= set(fitting)
        assert begun & set(active) <= set(before)
        begun.update(fitting)
        # The same holds for the siblings of a begun sequence, once the prompt is computed. (With a window, shared
        # blocks are counted conservatively, so a sibling may wait for a short time.)
        for sequence in active if sizes["window"] is None else ():
            count = len(sequence.request.sequences)
            blocks = bench.cache.forecast().blocks_to_end(sequence) * count
            fits = blocks <= bench.cache.pool.num_blocks and count <= sizes["max_batch_size"]
            if sequence.request.begun and fits and sequence.awaited is None:
                assert sequence in fitting

    bench = bench_of("guaranteed_no_evict", sizes, look)
    all_get_what_fits(bench)
    play(bench, arrivals)
    assert bench.cache.preemptions == 0


@many
@given(arrivals, sizes)
def test_static_batch_admits_none_until_all_have_ended(arrivals, sizes):
    batches = [set()]

    def look(active, before, fitting, paused):
        batch = set(policy._batch)
        assert paused == []
        assert set(before) <= set(fitting)
        assert {sequence.request for sequence in fitting} <= batch
        if batch != batches[-1]:
            assert not any(request.num_live for request in batches[-1])
            batches.append(batch)

    bench = bench_of("static_batch", sizes, look)
    policy = bench.engine._scheduler._capacity._scheduler
    all_get_what_fits(bench)
    play(bench, arrivals)
    assert bench.cache.preemptions == 0


@many
@given(arrivals, sizes, st.sampled_from(POLICIES), st.sampled_from(["first_come_first_served", "equal_progress"]))
def test_a_step_respects_its_limits(arrivals, sizes, policy, chunking):
    if not sizes["chunked_context"]:
        chunking = "first_come_first_served"
    bench = bench_of(policy, sizes, lambda *answer: None, context_chunking_policy=chunking)
    play(bench, arrivals)
    for step in bench.runner.steps:
        tokens = [len(part.tokens) for part in step.slices]
        assert len(tokens) <= sizes["max_batch_size"]
        contexts = [part for part in step.slices if part.start == 0 or len(part.tokens) > 1]
        assert sum(tokens) <= sizes["max_tokens_per_step"] or (not sizes["chunked_context"] and len(contexts) == 1)


@many
@given(arrivals, sizes)
def test_less_than_a_unit_of_the_token_budget_is_unused(arrivals, sizes):
    bench = bench_of("max_utilization", {**sizes, "chunked_context": True}, lambda *answer: None)
    schedule = bench.engine._scheduler.schedule

    def looking(*arguments):
        scheduled = schedule(*arguments)
        unit, budget, size = 4, sizes["max_tokens_per_step"], sizes["max_batch_size"]
        rest = budget - len(scheduled.generation) - sum(chunk.num_tokens for chunk in scheduled.context)
        took = {chunk.sequence: chunk.num_tokens for chunk in scheduled.context}
        idle = [s for s in bench.cache.holders if not s.generating and took.get(s, 0) < s.num_pending]
        if idle and len(scheduled.generation) + len(scheduled.context) < size:
            assert rest < unit
        return scheduled

    bench.engine._scheduler.schedule = looking
    play(bench, arrivals)
