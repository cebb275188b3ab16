"""Requests that continue after the tokens of an earlier attempt."""

from itertools import product

import pytest

from engine_worker.request import State
from engine_worker.scheduling.build import POLICIES
from sluice.settings.engine import SchedulerNames
from sluice.wire.errors import FinishReason
from sluice.wire.rows import PROMPT_END_TOKENS
from sluice.wire.stats import Stage
from tests.fakes.engine import EngineBench, spec_of
from tests.fakes.rows import rows_of
from tests.fakes.scripted_tokens import continuation

pytestmark = pytest.mark.usefixtures("both_overlaps")

PROMPT = list(range(10))


def whole(max_tokens: int, sequence: int = 0, **fields) -> list[int]:
    """The output of an undisturbed sequence of PROMPT."""
    spec = spec_of(PROMPT, max_tokens, **fields)
    return continuation(spec.prompt, spec.stopping, spec.sampling.seed, sequence)


def reported(bench: EngineBench, request: int):
    return [stats for report in bench.reports for stats in report.requests if stats.request == request]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_resumes_after_any_token(policy, reuse):
    expected = whole(9)
    for cut in range(9):
        bench = EngineBench(schedulers=SchedulerNames(policy), block_reuse=reuse, max_tokens_per_step=8)
        request = bench.submit(PROMPT, max_tokens=9, attempt=1, resume={0: expected[:cut]})
        bench.run()
        stream = bench.stream(request, attempt=1)
        assert (stream.resumed, stream.tokens, stream.end.reason) == (cut, expected, FinishReason.LENGTH)


@pytest.mark.parametrize("cached", [0, 4, 8, 12, 16])
def test_a_sequence_resumes_with_any_cached_prefix(cached):
    """If only the last token remains to be computed, the sequence counts as generation."""
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


def test_sequences_resume_independently():
    """Sequence 0 has some tokens, 1 has ended, 2 and 4 have none (4 awaits the prompt), 3 has one."""
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
        assert opened.prompt_end == list(PROMPT)[-PROMPT_END_TOKENS:]


def test_sequences_without_tokens_share_the_prompt():
    bench = EngineBench(block_reuse=False)
    outputs = [whole(6, i) for i in range(4)]
    request = bench.submit(PROMPT, max_tokens=6, n=4, attempt=1, resume={0: outputs[0][:3]})
    bench.run()
    assert [bench.output(request, i, 1) for i in range(4)] == outputs
    # Sequence 0 computes its prompt and its resumed tokens, another sequence the prompt for the other three.
    assert bench.runner.computed == (10 + 3 + 2) + 10 + 3 * 5


def test_the_sequence_that_computes_the_prompt_may_be_cancelled():
    bench = EngineBench(max_tokens_per_step=8)
    outputs = [whole(6, i) for i in range(4)]
    request = bench.submit(PROMPT, max_tokens=6, n=4, attempt=1, resume={0: outputs[0][:3]})
    bench.step()
    bench.cancel(request, 1, attempt=1)
    bench.run()
    assert bench.ended(request, 1, 1) is FinishReason.ABORTED
    assert [bench.output(request, i, 1) for i in (0, 2, 3)] == [outputs[i] for i in (0, 2, 3)]


def test_complete_sequences_end_without_a_step():
    output = whole(8)
    for fields, size, reason, stop_token in [
        ({"max_tokens": 5}, 5, FinishReason.LENGTH, None),
        ({"eos_token_ids": (output[2],)}, 3, FinishReason.EOS, None),
        ({"stop_token_ids": (output[2],)}, 3, FinishReason.STOP_TOKEN, output[2]),
        ({"stop_token_ids": (output[2],), "min_tokens": 2}, 3, FinishReason.STOP_TOKEN, output[2]),
    ]:
        bench = EngineBench()
        request = bench.submit(PROMPT, attempt=1, resume={0: output[:size]}, **fields)
        assert not bench.step()
        stream = bench.stream(request, attempt=1)
        assert (stream.end.reason, stream.end.stop_token) == (reason, stop_token)
        assert (stream.resumed, stream.tokens, bench.runner.steps) == (size, output[:size], [])
        assert reported(bench, request)[-1].stage is Stage.ENDED


def test_a_resumed_end_token_before_min_tokens_does_not_end():
    output = whole(8)
    bench = EngineBench()
    request = bench.submit(PROMPT, attempt=1, resume={0: output[:3]}, eos_token_ids=(output[2],), min_tokens=3)
    bench.run()
    assert bench.stream(request, attempt=1).tokens[:4] == output[:4]


def test_a_complete_sequence_alongside_one_that_continues():
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


def test_times_start_with_this_attempt():
    bench = EngineBench()
    request = bench.submit(PROMPT, 6, attempt=1, resume={0: whole(6)[:3]})
    bench.run()
    times = bench.stream(request, attempt=1).end.times
    assert times.queue == 0
    assert times.generation == pytest.approx(0.02)
    assert reported(bench, request)[-1].first_token is not None
    assert bench.engine.stats.generated_tokens == 3


def test_logprobs_are_sent_for_new_tokens_only():
    bench = EngineBench()
    request = bench.submit(PROMPT, 6, attempt=1, resume={0: whole(6)[:4]}, logprobs=0)
    bench.run()
    assert len(bench.stream(request, attempt=1).logprobs) == 2


def test_more_resumed_sequences_than_fit():
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


def test_a_resumed_sequence_is_preempted():
    bench = EngineBench(num_blocks=9)
    expected = whole(20)
    first = bench.submit(range(50, 58), max_tokens=20)
    request = bench.submit(PROMPT, 20, attempt=1, resume={0: expected[:2]})
    bench.run()
    assert bench.cache.preemptions > 0
    assert bench.output(request, attempt=1) == expected
    assert bench.output(first) == bench.expected(first)


def test_a_step_with_resumed_sequences_may_fail():
    """Sequences that await the prompt end with the step that computes it; resumed ones do not."""
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
    ("fields", "message"),
    [
        ({"resume": {2: [1]}}, "resume must name sequences from 0 to 1 (got 2)"),
        ({"resume": {-1: [1]}}, "resume must name sequences from 0 to 1 (got -1)"),
        ({"ended": [0, 2]}, "ended must name sequences from 0 to 1 (got 2)"),
        ({"resume": {1: [1] * 9}}, "resume must have at most 8 (max_tokens) tokens (got 9 for sequence 1)"),
        ({"resume": {1: [1, 97]}}, "resume token ids must be from 0 to 96 (got 97 in sequence 1)"),
        ({"resume": {0: [-1]}}, "resume token ids must be from 0 to 96 (got -1 in sequence 0)"),
    ],
)
def test_invalid_resumes_are_refused(fields, message):
    bench = EngineBench()
    request = bench.submit(PROMPT, n=2, **fields)
    bench.engine.step()
    (batch,) = bench.receiver.lanes["mem://a"].messages
    rows = list(rows_of(batch))
    assert {row.sequence for row in rows} == {0, 1}.difference(fields.get("ended", ()))
    assert {(row.end.fault.code, row.end.fault.message) for row in rows} == {("INVALID_ARGUMENT", message)}
    assert all(row.offset == len(fields.get("resume", {}).get(row.sequence, ())) for row in rows)
    assert not bench.engine.live.requests
    assert bench.mailbox._submits == {} == bench.mailbox._num_live
    assert request


def test_a_request_without_remaining_sequences_is_dropped():
    bench = EngineBench()
    bench.submit(PROMPT, n=2, ended=[1, 0])
    bench.run()
    assert bench.dropped == {"invalid": 1}
    assert bench.receiver.streams == {}


def test_a_refused_resume_keeps_its_tokens():
    bench = EngineBench()
    bench.mailbox.draining = True
    request = bench.submit(PROMPT, n=3, resume={0: [1, 2], 2: [3]}, ended=[1])
    bench.run()
    assert [bench.output(request, 0), bench.output(request, 2)] == [[1, 2], [3]]
    assert {bench.fault(request, 0), bench.fault(request, 2)} == {"DRAINING"}


def test_a_cancel_of_an_ended_sequence_is_unknown():
    bench = EngineBench()
    request = bench.submit(PROMPT, n=2, ended=[0])
    bench.cancel(request, 0)
    bench.run()
    assert bench.dropped == {"unknown_cancel": 1}
    assert bench.output(request, 1) == bench.expected(request, 1)


def test_a_resumed_sequence_waits_without_memory():
    bench = EngineBench(num_blocks=6)
    bench.submit(range(20), 4, request=1)
    bench.step()
    bench.submit(range(50, 60), 8, request=2, attempt=1, resume={0: [3, 4]})
    bench.step()
    (sequence,) = bench.engine.live.requests[2].sequences
    assert sequence.state is State.WAITING
    bench.run()
