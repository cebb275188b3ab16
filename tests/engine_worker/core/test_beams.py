"""Beam search in the engine equals the rules alone, regardless of memory, batch size, preemption and failures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.settings.engine import SchedulerNames
from sluice.wire.errors import FinishReason
from sluice.wire.params import BeamSearchParams
from tests.examples import examples
from tests.fakes.beams import search_alone
from tests.fakes.engine import EngineBench


def check(bench: EngineBench, request: int, attempt: int = 0) -> None:
    spec = bench.specs[request, attempt]
    for index, (tokens, reason) in enumerate(search_alone(spec)[: spec.n]):
        if index not in spec.ended:
            stream = bench.stream(request, index, attempt)
            assert stream.tokens == tokens
            assert stream.end.reason is reason
            assert len(stream.logprobs) == len(tokens)


def free(bench: EngineBench) -> bool:
    return bench.cache.pool.available == bench.cache.pool.num_blocks and not bench.cache.holders


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("width", [2, 3, 8])
def test_beam_search_alongside_sampled_requests(width, overlap):
    bench = EngineBench(max_batch_size=16, overlap=overlap)
    sampled = bench.submit(range(10), max_tokens=12)
    search = bench.submit(range(5, 18), max_tokens=10, n=2, beams=BeamSearchParams(width), eos_token_ids=(3, 4, 5))
    other = bench.submit(range(7), max_tokens=9, n=2)
    bench.run()
    check(bench, search)
    assert bench.output(sampled) == bench.expected(sampled)
    assert [bench.output(other, i) for i in (0, 1)] == [bench.expected(other, i) for i in (0, 1)]
    assert free(bench)
    widest = max(len(step.slices) for step in bench.runner.steps)
    assert widest == width + 3 or overlap


def test_the_first_child_copies_no_block_and_others_copy_one():
    bench = EngineBench(tokens_per_block=4)
    search = bench.submit(range(6), max_tokens=3, beams=BeamSearchParams(3))
    bench.run()
    check(bench, search)
    copied = [move for step in bench.runner.steps for move in step.moves]
    assert len(copied) <= 2 * 2
    assert bench.runner.computed == 6 + 2 * 3


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("blocks", [5, 6, 7, 9])
def test_a_pool_that_holds_one_beam_is_enough(blocks, overlap):
    bench = EngineBench(num_blocks=blocks, tokens_per_block=4, overlap=overlap)
    search = bench.submit(range(9), max_tokens=9, n=3, beams=BeamSearchParams(4, length_penalty=0.5))
    sampled = bench.submit(range(4), max_tokens=8)
    bench.run()
    check(bench, search)
    assert bench.output(sampled) == bench.expected(sampled)
    assert free(bench)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_more_beams_than_fit_the_batch_take_turns(batch):
    bench = EngineBench(max_batch_size=batch)
    search = bench.submit(range(9), max_tokens=7, n=5, beams=BeamSearchParams(5))
    bench.run()
    check(bench, search)
    assert free(bench)


@pytest.mark.parametrize("steps", range(1, 12))
@pytest.mark.parametrize("overlap", [False, True])
def test_a_cancel_frees_every_fork(steps, overlap):
    bench = EngineBench(num_blocks=16, overlap=overlap)
    search = bench.submit(range(9), max_tokens=30, n=2, beams=BeamSearchParams(4))
    for _ in range(steps):
        bench.step()
    bench.cancel(search)
    bench.run()
    assert [bench.ended(search, i) for i in (0, 1)] == [FinishReason.ABORTED] * 2
    assert free(bench)


@pytest.mark.parametrize("when", ["launch", "before", "after"])
def test_a_failed_step_ends_the_search_and_frees_it(when):
    bench = EngineBench(overlap=True)
    search = bench.submit(range(9), max_tokens=30, n=2, beams=BeamSearchParams(4))
    for _ in range(6):
        bench.step()
    bench.runner.fail = when
    bench.run()
    assert [bench.fault(search, i) for i in (0, 1)] == ["STEP_FAILED"] * 2
    assert free(bench)


def test_a_failed_draw_ends_the_search():
    bench = EngineBench()
    search = bench.submit(range(9), max_tokens=30, n=2, beams=BeamSearchParams(4), seed=5)
    bench.step()
    bench.runner.faults.add((5, 0))
    bench.run()
    assert [bench.fault(search, i) for i in (0, 1)] == ["NOTHING_TO_SAMPLE"] * 2
    assert free(bench)


def test_a_later_attempt_searches_again_and_returns_the_missing_outputs():
    bench = EngineBench()
    fields = {"max_tokens": 10, "n": 3, "beams": BeamSearchParams(4), "eos_token_ids": (3, 4, 5)}
    first = bench.submit(range(9), **fields)
    bench.run()
    bench.submit(range(9), request=first, attempt=1, ended=(0, 2), **fields)
    bench.run()
    check(bench, first, attempt=1)
    assert (first, 1, 0) not in bench.receiver.streams or not bench.stream(first, 0, 1).tokens


def test_other_policies_refuse_beam_search():
    bench = EngineBench(schedulers=SchedulerNames("guaranteed_no_evict"))
    search = bench.submit(range(9), beams=BeamSearchParams(2))
    bench.run()
    end = bench.stream(search).end
    assert (end.fault.code, end.fault.field) == ("NOT_BUILT_YET", "spec.sampling.beam_search")


@given(st.data())
@examples(60)
def test_memory_pressure_cancels_and_failures_do_not_change_outputs(data):
    size = data.draw(st.sampled_from([1, 2, 3, 4]))
    bench = EngineBench(
        num_blocks=data.draw(st.integers(30, 60)) // size,
        tokens_per_block=size,
        max_batch_size=data.draw(st.integers(1, 8)),
        max_tokens_per_step=data.draw(st.sampled_from([8, 13, 40])),
        overlap=data.draw(st.booleans()),
        block_reuse=data.draw(st.booleans()),
        num_host_blocks=data.draw(st.sampled_from([0, 10])),
        window=data.draw(st.sampled_from([None, None, 4, 9])),
    )
    cancelled = set()
    for _ in range(data.draw(st.integers(1, 8))):
        width = data.draw(st.integers(1, 6))
        bench.submit(
            range(data.draw(st.integers(0, 3)), data.draw(st.integers(5, 16))),
            max_tokens=data.draw(st.integers(1, 12)),
            n=data.draw(st.integers(1, width)),
            beams=data.draw(
                st.sampled_from(
                    [
                        None,
                        BeamSearchParams(width),
                        BeamSearchParams(width, 2.0, exhaustive=True),
                        BeamSearchParams(width, -1.0, early_stopping=True, diversity_rate=0.3),
                    ]
                )
            ),
            eos_token_ids=tuple(range(data.draw(st.sampled_from([0, 1, 9])))),
            min_tokens=data.draw(st.integers(0, 3)),
        )
        for _ in range(data.draw(st.integers(0, 6))):
            bench.step()
        if data.draw(st.integers(0, 3)) == 0:
            number = data.draw(st.integers(1, len(bench.specs)))
            bench.cancel(number)
            cancelled.add(number)
    bench.run()
    assert free(bench)
    for number, _ in bench.specs:
        spec = bench.specs[number, 0]
        if number in cancelled or bench.ended(number) is FinishReason.ERROR:
            assert number in cancelled or bench.fault(number) == "CONTEXT_OVERFLOW"
        elif spec.sampling.beam_search is None:
            assert [bench.output(number, i) for i in range(spec.n)] == [
                bench.expected(number, i) for i in range(spec.n)
            ]
        else:
            check(bench, number)
