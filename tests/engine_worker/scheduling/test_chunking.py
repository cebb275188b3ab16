"""Chunking policies: how contexts share the token budget of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.request import Request, Sequence
from engine_worker.scheduling.micro_batch import equal_progress, first_come_first_served, whole
from tests.fakes.engine import EngineBench, spec_of


def context(start: int, pending: int) -> Sequence:
    sequence = Request(spec_of(range(start + pending)), b"root", 1, 0.0).sequences[0]
    sequence.num_computed, sequence.num_placed = start, start + pending
    return sequence


contexts = st.lists(st.builds(context, st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=8)
budgets, units = st.integers(1, 100), st.integers(1, 16)


@given(contexts, budgets, units, st.sampled_from([first_come_first_served, equal_progress]))
def test_chunks_are_within_the_budget_and_end_at_units(waiting, budget, unit, share):
    sizes = share(waiting, budget, unit)
    assert 1 <= sum(sizes) <= budget
    cut = False
    for sequence, size in zip(waiting, sizes, strict=False):
        assert 0 <= size <= sequence.num_pending
        if size < sequence.num_pending:
            cut = True
            assert size == 0 or (sequence.num_computed + size) % min(unit, budget) == 0
    if cut or len(sizes) < len(waiting):
        assert budget - sum(sizes) < unit


@given(contexts, budgets, units)
def test_first_come_first_served_is_in_order(waiting, budget, unit):
    """A context receives tokens only if each context before it is complete, or cannot use a unit of the remaining
    budget."""
    sizes = first_come_first_served(waiting, budget, unit)
    for index, sequence in enumerate(waiting[: len(sizes)]):
        if sizes[index] < sequence.num_pending:
            unused = budget - sum(sizes[: index + 1])
            start = sequence.num_computed + sizes[index]
            assert unused < min(unit, budget) - start % min(unit, budget)


@given(contexts, budgets, units, st.booleans())
def test_equal_progress_spreads_within_one_unit(waiting, budget, unit, aligned):
    """Counted in units if contexts begin within a unit."""
    unit = min(unit, budget)
    for sequence in waiting:
        if aligned:
            sequence.num_computed -= sequence.num_computed % unit
    sizes = equal_progress(waiting, budget, unit)
    if not aligned:
        sizes = [size + s.num_computed % unit if size else 0 for s, size in zip(waiting, sizes, strict=True)]
        for sequence in waiting:
            sequence.num_computed -= sequence.num_computed % unit
    unfinished = [size for sequence, size in zip(waiting, sizes, strict=True) if size < sequence.num_pending]
    finished = [size for sequence, size in zip(waiting, sizes, strict=True) if size == sequence.num_pending]
    if unfinished:
        assert max(unfinished) - min(unfinished) <= unit
        assert max(finished, default=0) <= min(unfinished) + unit


@given(contexts, budgets)
def test_whole_contexts_only(waiting, budget):
    sizes = whole(waiting, budget)
    assert sizes == [sequence.num_pending for sequence in waiting[: len(sizes)]]
    assert len(sizes) == 1 or sum(sizes) <= budget


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ("first_come_first_served", [[12], [4, 8], [2, 8], [12]]),
        ("equal_progress", [[4, 4, 4], [4, 4, 4], [4, 2, 4], [4, 8]]),
    ],
)
def test_chunking_policies_in_an_engine(policy, steps):
    bench = EngineBench(max_batch_size=3, max_tokens_per_step=12, context_chunking_policy=policy)
    for number, size in enumerate((16, 10, 20)):
        bench.submit([90 - number, *range(1, size)], max_tokens=1)
    bench.run()
    assert [[len(part.tokens) for part in step.slices] for step in bench.runner.steps] == steps
