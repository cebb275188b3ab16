"""Requests that go on where an earlier attempt stopped, and those that take the place of one."""

from itertools import product

import pytest

from engine_worker.scheduling.build import POLICIES
from engine_worker.sequence import State
from sluice.ring.errors import FinishReason
from sluice.ring.stats import Stage
from sluice.settings.engine import SchedulerNames
from tests.fakes.engine import EngineBench, spec_of
from tests.fakes.rows import rows_of
from tests.fakes.scripted_tokens import continuation

pytestmark = pytest.mark.usefixtures("either_way")

PROMPT = list(range(10))


def whole(max_tokens: int, sequence: int = 0, **asked) -> list[int]:
    """What an undisturbed sequence of PROMPT gets."""
    spec = spec_of(PROMPT, max_tokens, **asked)
    return continuation(spec.prompt, spec.stopping, spec.sampling.seed, sequence)


def reported(bench: EngineBench, request: int):
    return [found for report in bench.reports for found in report.requests if found.request == request]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_it_goes_on_from_every_token(policy, reuse):
    expected = whole(9)
    for cut in range(9):
        bench = EngineBench(schedulers=SchedulerNames(policy), block_reuse=reuse, max_tokens_per_step=8)
        request = bench.submit(PROMPT, max_tokens=9, attempt=1, resume={0: expected[:cut]})
        bench.run()
        stream = bench.stream(request, attempt=1)
        assert (stream.resumed, stream.tokens, stream.end.reason) == (cut, expected, FinishReason.LENGTH)


@pytest.mark.parametrize("cached", [0, 4, 8, 12, 16])
def test_it_goes_on_over_any_cached_prefix(cached):
    """Even where it has only its last token to compute, and is no context."""
    expected = whole(9)
    bench = EngineBench()
    if cached:
        bench.submit([*PROMPT, *expected][:cached], max_tokens=1)
        bench.run()
    request = bench.submit(PROMPT, max_tokens=9, attempt=1, resume={0: expected[:7]})
    bench.run()
    assert bench.output(request, attempt=1) == expected
    assert bench.receiver.opens[request, 1].cached_tokens == min(cached, 10)
    last = reported(bench, request)[-1]
    assert (last.stage, last.cached_tokens, last.generated_tokens) == (Stage.ENDED, min(cached, 10), 2)
    assert last.first_scheduled is not None


def test_sequences_resume_each_on_its_own():
    """0 is in its middle, 1 has ended, 2 has its prompt alone, and so has 4, which awaits it; 3 has one token."""
    for reuse in (True, False):
        bench = EngineBench(block_reuse=reuse)
        outputs = [whole(8, i, seed=5) for i in range(5)]
        resume = {0: outputs[0][:5], 1: outputs[1], 2: [], 3: outputs[3][:1]}
        request = bench.submit(PROMPT, n=5, seed=5, attempt=2, resume=resume, ended=[1])
        bench.step()
        sequences = bench.engine.live.requests[request].sequences
        assert [sequence.index for sequence in sequences] == [0, 2, 3, 4]
        bench.run()
        for index in (0, 2, 3, 4):
            assert bench.output(request, index, 2) == outputs[index]
        assert (request, 2, 1) not in bench.receiver.streams
        opened = bench.receiver.opens[request, 2]
        assert (opened.n, opened.resume, opened.ended) == (5, resume, [1])


def test_those_without_a_token_share_the_prompt():
    bench = EngineBench(block_reuse=False)
    outputs = [whole(6, i) for i in range(4)]
    request = bench.submit(PROMPT, max_tokens=6, n=4, attempt=1, resume={0: outputs[0][:3]})
    bench.run()
    assert [bench.output(request, i, 1) for i in range(4)] == outputs
    # Sequence 0 computes its prompt and what it resumes, another the prompt for the three.
    assert bench.runner.computed == (10 + 3 + 2) + 10 + 3 * 5


def test_whoever_was_to_compute_the_prompt_may_go():
    bench = EngineBench(max_tokens_per_step=8)
    outputs = [whole(6, i) for i in range(4)]
    request = bench.submit(PROMPT, max_tokens=6, n=4, attempt=1, resume={0: outputs[0][:3]})
    bench.step()
    bench.cancel(request, 1, attempt=1)
    bench.run()
    assert bench.ended(request, 1, 1) is FinishReason.ABORTED
    assert [bench.output(request, i, 1) for i in (0, 2, 3)] == [outputs[i] for i in (0, 2, 3)]


def test_what_is_complete_ends_without_a_step():
    output = whole(8)
    for asked, size, reason, stop_token in [
        ({"max_tokens": 5}, 5, FinishReason.LENGTH, None),
        ({"eos_token_ids": (output[2],)}, 3, FinishReason.EOS, None),
        ({"stop_token_ids": (output[2],)}, 3, FinishReason.STOP_TOKEN, output[2]),
        ({"stop_token_ids": (output[2],), "min_tokens": 2}, 3, FinishReason.STOP_TOKEN, output[2]),
    ]:
        bench = EngineBench()
        request = bench.submit(PROMPT, attempt=1, resume={0: output[:size]}, **asked)
        assert not bench.step()
        stream = bench.stream(request, attempt=1)
        assert (stream.end.reason, stream.end.stop_token) == (reason, stop_token)
        assert (stream.resumed, stream.tokens, bench.runner.steps) == (size, output[:size], [])
        assert reported(bench, request)[-1].stage is Stage.ENDED


def test_an_end_token_before_min_tokens_ends_nothing():
    output = whole(8)
    bench = EngineBench()
    request = bench.submit(PROMPT, attempt=1, resume={0: output[:3]}, eos_token_ids=(output[2],), min_tokens=3)
    bench.run()
    assert bench.stream(request, attempt=1).tokens[:4] == output[:4]


def test_a_complete_one_beside_one_that_goes_on():
    outputs = [whole(6, i) for i in range(3)]
    bench = EngineBench(num_blocks=8, max_tokens_per_step=8)
    neighbour = bench.submit(range(20, 40), max_tokens=11)
    bench.step()
    request = bench.submit(PROMPT, 6, n=3, attempt=1, resume={0: outputs[0], 1: outputs[1][:2]})
    bench.step()
    assert bench.ended(request, 0, 1) is FinishReason.LENGTH
    assert reported(bench, request)[-1].stage is Stage.QUEUED
    assert bench.engine.stats.latest.queued_requests == 2
    bench.run()
    assert [bench.output(request, i, 1) for i in range(3)] == outputs
    assert bench.output(neighbour) == bench.expected(neighbour)
    last = reported(bench, request)[-1]
    assert (last.generated_tokens, last.stage, last.first_scheduled is None) == (4 + 6, Stage.ENDED, False)


def test_times_begin_with_this_attempt():
    bench = EngineBench()
    request = bench.submit(PROMPT, 6, attempt=1, resume={0: whole(6)[:3]})
    bench.run()
    times = bench.stream(request, attempt=1).end.times
    assert times.queue == 0
    assert times.generation == pytest.approx(0.02)
    assert reported(bench, request)[-1].first_token is not None
    assert bench.engine.stats.generated_tokens == 3


def test_logprobs_come_for_new_tokens_alone():
    bench = EngineBench()
    request = bench.submit(PROMPT, 6, attempt=1, resume={0: whole(6)[:4]}, logprobs=0)
    bench.run()
    assert len(bench.stream(request, attempt=1).logprobs) == 2


def test_more_than_fit_are_paused_and_go_on():
    for policy, size in product(POLICIES, (8, 9, 11)):
        bench = EngineBench(num_blocks=size, max_batch_size=4, schedulers=SchedulerNames(policy))
        outputs = [whole(14, i) for i in range(9)]
        resume = {i: outputs[i][: (i * 5) % 14] for i in range(7)}
        request = bench.submit(PROMPT, 14, n=9, attempt=1, resume=resume, ended=[3])
        neighbour = bench.submit(range(40, 50), 10)
        bench.run()
        assert [bench.output(request, i, 1) for i in range(9) if i != 3] == outputs[:3] + outputs[4:]
        assert bench.output(neighbour) == bench.expected(neighbour)
        assert policy == "max_utilization" or bench.cache.preemptions == 0


def test_a_paused_one_that_had_resumed():
    bench = EngineBench(num_blocks=9)
    expected = whole(20)
    first = bench.submit(range(50, 58), max_tokens=20)
    request = bench.submit(PROMPT, 20, attempt=1, resume={0: expected[:2]})
    bench.run()
    assert bench.cache.preemptions > 0
    assert bench.output(request, attempt=1) == expected
    assert bench.output(first) == bench.expected(first)


def test_its_step_may_fail():
    """With it whoever awaits the prompt, if the prompt was in it; not those that have tokens."""
    outputs = [whole(6, i) for i in range(3)]
    bench = EngineBench(max_tokens_per_step=13)
    request = bench.submit(PROMPT, 6, n=3, attempt=1, resume={0: outputs[0][:2]})
    bench.step()
    bench.runner.fail = "before"
    bench.run()
    ends = [bench.ended(request, i, 1) for i in range(3)]
    assert FinishReason.ERROR in ends
    for index, reason in enumerate(ends):
        if reason is FinishReason.LENGTH:
            assert bench.output(request, index, 1) == outputs[index]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"resume": {2: [1]}}, "resume must name sequences from 0 to 1, got 2"),
        ({"resume": {-1: [1]}}, "resume must name sequences from 0 to 1, got -1"),
        ({"ended": [0, 2]}, "ended must name sequences from 0 to 1, got 2"),
        ({"resume": {1: [1] * 9}}, "resume must have at most max_tokens (8) tokens, got 9 for sequence 1"),
        ({"resume": {1: [1, 97]}}, "resume token ids must be from 0 to 96, got 97 in sequence 1"),
        ({"resume": {0: [-1]}}, "resume token ids must be from 0 to 96, got -1 in sequence 0"),
    ],
)
def test_what_cannot_be_resumed_is_refused(asked, message):
    bench = EngineBench()
    request = bench.submit(PROMPT, n=2, **asked)
    bench.engine.step()
    (batch,) = bench.receiver.lanes["mem://a"].messages
    rows = list(rows_of(batch))
    assert {row.sequence for row in rows} == {0, 1}.difference(asked.get("ended", ()))
    assert {(row.end.fault.code, row.end.fault.message) for row in rows} == {("INVALID_ARGUMENT", message)}
    assert all(row.offset == len(asked.get("resume", {}).get(row.sequence, ())) for row in rows)
    assert not bench.engine.live.requests
    assert bench.mailbox._submits == {} == bench.mailbox._num_live
    assert request


def test_a_request_of_which_nothing_is_left_cannot_be_answered():
    bench = EngineBench()
    bench.submit(PROMPT, n=2, ended=[1, 0])
    bench.run()
    assert bench.dropped == {"invalid": 1}
    assert bench.receiver.streams == {}


def test_a_refused_one_ends_where_it_stood():
    bench = EngineBench()
    bench.mailbox.draining = True
    request = bench.submit(PROMPT, n=3, resume={0: [1, 2], 2: [3]}, ended=[1])
    bench.run()
    assert [bench.output(request, 0), bench.output(request, 2)] == [[1, 2], [3]]
    assert {bench.fault(request, 0), bench.fault(request, 2)} == {"DRAINING"}


def test_a_cancel_of_what_had_ended_names_nothing():
    bench = EngineBench()
    request = bench.submit(PROMPT, n=2, ended=[0])
    bench.cancel(request, 0)
    bench.run()
    assert bench.dropped == {"unknown_cancel": 1}
    assert bench.output(request, 1) == bench.expected(request, 1)


@pytest.mark.parametrize("steps", range(6))
def test_the_next_attempt_takes_the_place_of_one_that_lives(steps):
    bench = EngineBench(max_requests=1)
    bench.submit(PROMPT, 9, n=2, request=5)
    for _ in range(steps):
        bench.step()
    had = {i: bench.output(5, i) if (5, 0, i) in bench.receiver.streams else [] for i in range(2)}
    bench.submit(PROMPT, 9, n=2, request=5, attempt=1, resume=had)
    bench.run()
    for index in range(2):
        assert bench.ended(5, index) is FinishReason.ABORTED
        assert bench.ended(5, index, 1) is FinishReason.LENGTH
        assert bench.output(5, index, 1) == bench.expected(5, index)
    assert bench.dropped == {}
    assert bench.mailbox._submits == {} == bench.mailbox._num_live
    assert bench.outbox._peers["mem://a"].users == 0


def test_many_attempts_in_one_breath_and_the_last_is_done():
    bench = EngineBench()
    for attempt in range(4):
        bench.submit(PROMPT, 6, request=5, attempt=attempt)
        if attempt == 1:
            bench.cancel(5, attempt=0)
    bench.run()
    assert [bench.ended(5, attempt=attempt) for attempt in range(3)] == [FinishReason.ABORTED] * 3
    assert bench.output(5, attempt=3) == bench.expected(5, attempt=3)


def test_a_cancel_of_one_sequence_does_not_keep_the_next_attempt_waiting():
    bench = EngineBench()
    bench.submit(PROMPT, 6, n=2, request=5)
    bench.step()
    bench.cancel(5, 1)
    bench.submit(PROMPT, 6, n=2, request=5, attempt=1, ended=[1])
    bench.run()
    assert [bench.ended(5, i) for i in range(2)] == [FinishReason.ABORTED] * 2
    assert bench.output(5, 0, 1) == bench.expected(5, 0)
    assert bench.dropped == {}


def test_an_attempt_that_comes_late_is_dropped():
    bench = EngineBench()
    bench.submit(PROMPT, 6, request=5, attempt=2)
    bench.step()
    for attempt in (0, 1, 2):
        bench.submit([1], 6, request=5, attempt=attempt)
    bench.run()
    assert bench.dropped == {"stale": 3}
    assert bench.output(5, attempt=2) == bench.expected(5, attempt=2)
    assert list(bench.receiver.opens) == [(5, 2)]


def test_an_attempt_meant_for_another_incarnation_ends_nobody():
    bench = EngineBench()
    bench.submit(PROMPT, 6, request=5)
    bench.step()
    bench.submit(PROMPT, 6, request=5, attempt=1, epoch=1)
    bench.run()
    assert bench.dropped == {"other_epoch": 1}
    assert bench.output(5) == bench.expected(5)


def test_the_blocks_of_the_former_attempt_make_the_next_one_cheap():
    bench = EngineBench()
    bench.submit(range(40), 20, request=5)
    for _ in range(12):
        bench.step()
    had, computed = bench.output(5), bench.runner.computed
    bench.submit(range(40), 20, request=5, attempt=1, resume={0: had})
    bench.run()
    assert bench.output(5, attempt=1) == bench.expected(5)
    assert bench.runner.computed - computed <= 20 - len(had) + 4 + 2


def test_a_resumed_one_waits_before_it_holds_memory():
    bench = EngineBench(num_blocks=6)
    bench.submit(range(20), 4, request=1)
    bench.step()
    bench.submit(range(50, 60), 8, request=2, attempt=1, resume={0: [3, 4]})
    bench.step()
    (sequence,) = bench.engine.live.requests[2].sequences
    assert sequence.state is State.WAITING
    bench.run()
