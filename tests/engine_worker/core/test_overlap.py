"""Steps that are launched while the previous one is in flight, and late results.

All tests with the fixture `both_overlaps`, and the state machine, test that streams do not depend on overlap.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.request import State
from sluice.settings.engine import SchedulerNames
from sluice.wire.errors import Fault, FinishReason
from tests.examples import examples
from tests.fakes.engine import EngineBench


def overlapping(**options) -> EngineBench:
    return EngineBench(overlap=True, **options)


def flying(bench: EngineBench) -> int:
    return len(bench.engine._in_flight)


def test_a_step_is_launched_before_the_one_before_it_is_collected():
    bench = overlapping()
    request = bench.submit([1, 2, 3], max_tokens=4)
    bench.step()
    assert (flying(bench), bench.runner.steps) == (1, [])
    for tokens in range(1, 4):
        bench.step()
        assert (flying(bench), len(bench.runner.steps), len(bench.output(request))) == (1, tokens, tokens)
    bench.step()
    assert flying(bench) == 0
    assert bench.output(request) == bench.expected(request)
    assert not bench.step()


def test_nothing_is_computed_for_a_sequence_whose_last_token_is_being_sampled():
    bench = overlapping()
    requests = [bench.submit([i, i + 1, i + 2], max_tokens=3 + i) for i in range(4)]
    bench.run()
    assert bench.runner.computed == sum(3 + (3 + i) - 1 for i in range(4))
    assert all(bench.output(request) == bench.expected(request) for request in requests)


def test_the_late_result_of_an_ended_sequence_is_dropped():
    plain = EngineBench()
    first = plain.submit([5, 6], max_tokens=6)
    plain.run()
    bench = overlapping()
    end = plain.output(first)[3]
    request = bench.submit([5, 6], max_tokens=20, eos_token_ids=(end,))
    other = bench.submit([7, 8], max_tokens=20)
    bench.run()
    assert bench.output(request) == plain.output(first)[:4]
    assert bench.ended(request) is FinishReason.EOS
    assert bench.output(other) == bench.expected(other)
    late = [part for step in bench.runner.steps for part in step.slices if part.tokens == (end,) and part.start == 5]
    assert len(late) == 1


def test_blocks_of_a_cancelled_request_are_released_after_its_step():
    bench = overlapping(num_blocks=16)
    request = bench.submit(range(9), max_tokens=20)
    bench.step()
    sequence = bench.engine.live.requests[request].sequences[0]
    blocks = list(sequence.blocks)
    bench.cancel(request)
    other = bench.submit(range(40, 60), max_tokens=8)
    seen = []
    launch = bench.runner.launch

    def watching(step):
        seen.append((sequence.state, list(sequence.blocks), [list(part.block_table) for part in step.slices]))
        return launch(step)

    bench.runner.launch = watching
    bench.run()
    state, old_blocks, (table,) = seen[0]
    assert (state, old_blocks) == (State.ENDED, blocks)
    assert not set(old_blocks) & set(table)
    assert bench.output(request) == []
    assert bench.ended(request) is FinishReason.ABORTED
    assert bench.output(other) == bench.expected(other)


def test_a_number_can_be_reused_while_its_first_step_is_in_flight():
    bench = overlapping()
    bench.submit([1, 2, 3], max_tokens=20, request=5)
    bench.step()
    bench.step()
    bench.cancel(5)
    bench.submit([1, 2, 3], max_tokens=6, request=5, attempt=1)
    bench.run()
    assert bench.stream(5).end.reason is FinishReason.ABORTED
    assert bench.stream(5, attempt=1).tokens == bench.expected(5, attempt=1)


def test_a_failed_step_ends_only_the_sequences_that_depend_on_it():
    bench = overlapping(max_batch_size=4)
    failing = [bench.submit([1, 2], max_tokens=9), bench.submit([3, 4], max_tokens=9)]
    bench.step()
    bench.runner.fail = "after"
    bench.step()
    newcomer = bench.submit([5, 6], max_tokens=9)
    bench.step()
    bench.run()
    assert [bench.fault(request) for request in failing] == ["STEP_FAILED"] * 2
    assert [bench.output(request) for request in failing] == [bench.expected(request)[:1] for request in failing]
    assert bench.output(newcomer) == bench.expected(newcomer)


def test_a_step_that_cannot_be_launched_fails_when_it_is_collected():
    bench = overlapping()
    request = bench.submit([1, 2], max_tokens=9)
    bench.step()
    bench.runner.fail = "launch"
    bench.step()
    assert bench.output(request) == bench.expected(request)[:1]
    later = bench.submit([3], max_tokens=3)
    bench.run()
    assert bench.fault(request) == "STEP_FAILED"
    assert len(bench.output(request)) == 1
    assert bench.output(later) == bench.expected(later)


def test_preemption_waits_for_the_step_in_flight():
    bench = overlapping(num_blocks=8, max_batch_size=2)
    requests = [bench.submit(range(i, i + 8), max_tokens=22) for i in (0, 20)]
    release = bench.cache.release

    def release_landed(sequence):
        assert not sequence.num_inflight
        release(sequence)

    bench.cache.release = release_landed
    bench.run()
    assert bench.cache.preemptions
    assert all(bench.output(request) == bench.expected(request) for request in requests)


def test_end_all_with_a_step_in_flight():
    bench = overlapping()
    request = bench.submit([1], max_tokens=50, n=2)
    for _ in range(3):
        bench.step()
    assert flying(bench)
    bench.engine.end_all(Fault("DRAINING", "bye"))
    bench.run()
    assert [bench.fault(request, i) for i in range(2)] == ["DRAINING"] * 2


@pytest.mark.parametrize("overlap", [False, True])
def test_statistics_are_reported_with_the_results(overlap):
    bench = EngineBench(overlap=overlap)
    bench.submit([1, 2], max_tokens=5)
    bench.run()
    steps = [report.step for report in bench.reports if report.step is not None]
    assert [step.iteration for step in steps] == [1, 2, 3, 4, 5]
    assert [(step.context_requests, step.generation_requests) for step in steps] == [(1, 0)] + [(0, 1)] * 4
    assert sum(step.step_seconds for step in steps) <= bench.clock.now - 100.0


REQUEST = st.tuples(
    st.integers(0, 9),  # step in which it arrives
    st.integers(1, 20),  # prompt
    st.integers(1, 16),  # max_tokens
    st.sampled_from([1, 1, 2, 3]),  # n
    st.lists(st.integers(0, 96), max_size=6),  # ends
    st.none() | st.tuples(st.integers(0, 12), st.none() | st.integers(0, 2)),  # cancel: steps later, sequence
)


@examples(150)
@given(st.lists(REQUEST, min_size=1, max_size=7), st.integers(8, 24), st.sampled_from([6, 12, 32]), st.booleans())
def test_streams_are_the_same_with_and_without_overlap(requests, num_blocks, budget, chunked):
    """Cancelled streams may end a token earlier or later; all are prefixes of the undisturbed ones."""
    benches = [
        EngineBench(num_blocks, 4, 4, budget, chunked, max_sequence_tokens=8 * 4, overlap=overlap)
        for overlap in (False, True)
    ]
    for bench in benches:
        for now in range(24):
            for i, (at, prompt, max_tokens, n, ends, cancel) in enumerate(requests):
                if at == now:
                    bench.submit(range(prompt), max_tokens, request=i, n=n, seed=i, eos_token_ids=tuple(ends))
                if cancel is not None and at + cancel[0] == now:
                    bench.cancel(i, cancel[1])
            bench.step()
        bench.run()
    plain, overlapped = benches
    assert plain.receiver.streams.keys() == overlapped.receiver.streams.keys()
    for (request, _, sequence), stream in overlapped.receiver.streams.items():
        other = plain.stream(request, sequence)
        cancelled = FinishReason.ABORTED in (stream.end.reason, other.end.reason)
        shorter = min(len(stream.tokens), len(other.tokens)) if cancelled else None
        assert stream.tokens[:shorter] == other.tokens[:shorter]
        assert cancelled or stream.end.reason is other.end.reason


def test_no_sequence_is_admitted_early_while_the_only_runnable_one_is_in_flight():
    """While a chunk of a windowed context is in flight, no sequence is admitted that does not fit to its end."""
    policy = SchedulerNames("guaranteed_no_evict")
    bench = EngineBench(48, 1, max_batch_size=6, max_tokens_per_step=6, window=30, overlap=True, schedulers=policy)
    first, second = bench.submit(range(12), max_tokens=17), bench.submit(range(20, 32), max_tokens=17)
    bench.step()
    bench.step()
    assert {holder.request.submit.request for holder in bench.cache.holders} == {first}
    bench.run()
    assert all(bench.output(request) == bench.expected(request) for request in (first, second))
