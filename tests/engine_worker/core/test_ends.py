"""The reasons for which sequences end, and their terminal rows."""

import pytest
from msgspec.structs import replace

from sluice.wire.errors import FinishReason
from tests.fakes.engine import EngineBench
from tests.fakes.runner import ScriptedRunner

pytestmark = pytest.mark.usefixtures("both_overlaps")
step_by_step = pytest.mark.parametrize("both_overlaps", [False], ids=[""], indirect=True)
"""For tests of single steps: without overlap only."""

PROMPT = [1, 2, 3, 4, 5]


def plain(max_tokens: int = 12) -> list[int]:
    """The continuation of PROMPT."""
    bench = EngineBench()
    request = bench.submit(PROMPT, max_tokens)
    bench.run()
    return bench.output(request)


@step_by_step
def test_length():
    bench = EngineBench()
    request = bench.submit(PROMPT, max_tokens=9)
    assert bench.run() == 9
    assert bench.output(request) == bench.expected(request)
    assert len(bench.output(request)) == 9
    assert bench.ended(request) is FinishReason.LENGTH


@pytest.mark.parametrize("at", [0, 3])
def test_the_end_token_is_the_last_token_of_the_row(at):
    bench = EngineBench()
    tokens = plain()
    request = bench.submit(PROMPT, max_tokens=12, eos_token_ids=(tokens[at],))
    bench.run()
    assert bench.output(request) == tokens[: at + 1]
    assert bench.ended(request) is FinishReason.EOS
    assert bench.stream(request).end.stop_token is None


def test_an_attempt_that_hands_over_ends_after_one_token_and_the_next_one_continues():
    bench, tokens = EngineBench(), plain()
    request = bench.submit(PROMPT, max_tokens=1, n=2, hands_over=True)
    bench.run()
    first = {index: bench.output(request, index) for index in range(2)}
    assert first[0] == tokens[:1]
    assert [bench.ended(request, index) for index in range(2)] == [FinishReason.HANDED_OVER] * 2
    assert not bench.engine.live.requests
    later = bench.submit(PROMPT, max_tokens=12, n=2, attempt=1, resume=first)
    bench.run()
    assert bench.output(later, attempt=1) == tokens
    assert bench.ended(later, attempt=1) is FinishReason.LENGTH


def test_an_end_token_ends_the_request_that_would_be_handed_over():
    bench = EngineBench()
    request = bench.submit(PROMPT, max_tokens=1, eos_token_ids=(plain()[0],), hands_over=True)
    bench.run()
    assert bench.ended(request) is FinishReason.EOS


def test_a_stop_token_is_named():
    bench = EngineBench()
    tokens = plain()
    request = bench.submit(PROMPT, max_tokens=12, stop_token_ids=(tokens[3], 96))
    bench.run()
    assert bench.output(request) == tokens[:4]
    assert bench.ended(request) is FinishReason.STOP_TOKEN
    assert bench.stream(request).end.stop_token == tokens[3]


def test_the_end_token_at_the_limit_counts_as_the_end():
    bench = EngineBench()
    tokens = plain()
    request = bench.submit(PROMPT, max_tokens=4, eos_token_ids=(tokens[3],))
    bench.run()
    assert bench.ended(request) is FinishReason.EOS


def test_end_tokens_are_banned_before_min_tokens():
    bench = EngineBench()
    tokens = plain()
    request = bench.submit(PROMPT, 12, min_tokens=3, eos_token_ids=(tokens[0],), stop_token_ids=(tokens[1],))
    bench.run()
    assert bench.output(request) == bench.expected(request)
    assert not {tokens[0], tokens[1]} & set(bench.output(request)[:3])
    banned = [draw.banned for step in bench.runner.steps for part in step.slices for draw in part.draws]
    assert banned[:4] == [(tokens[0], tokens[1])] * 3 + [()]


def test_a_banned_token_that_is_sampled_nevertheless_does_not_stop():
    bench = EngineBench()
    tokens = plain()
    request = bench.submit(PROMPT, 12, min_tokens=3, eos_token_ids=(tokens[1], tokens[2]))
    undisturbed = EngineBench()
    same = undisturbed.submit(PROMPT, 12)
    bench.runner.run = lambda step: ScriptedRunner.run(bench.runner, unbanned(step))
    bench.run()
    undisturbed.run()
    assert bench.output(request) == undisturbed.output(same)


def unbanned(step):
    return replace(
        step,
        slices=tuple(replace(s, draws=tuple(replace(draw, banned=()) for draw in s.draws)) for s in step.slices),
    )


@step_by_step
def test_time_limit_while_generating():
    bench = EngineBench()
    request = bench.submit(PROMPT, max_tokens=100, time_limit=0.055)
    bench.run()
    assert bench.ended(request) is FinishReason.TIME_LIMIT
    assert bench.output(request) == plain(100)[:6]


def test_time_limit_while_queued():
    bench = EngineBench(max_batch_size=1)
    first = bench.submit(PROMPT, max_tokens=20)
    request = bench.submit(PROMPT, max_tokens=20, n=2, time_limit=0.05)
    bench.run()
    for sequence in range(2):
        assert bench.ended(request, sequence) is FinishReason.TIME_LIMIT
        assert bench.output(request, sequence) == []
    assert bench.stream(request).end.times.queue == pytest.approx(0.05)
    assert bench.output(first) == bench.expected(first)


def test_a_failed_draw_ends_only_its_sequence():
    bench = EngineBench()
    bench.runner.faults.add((5, 1))
    request = bench.submit(PROMPT, n=3, seed=5)
    other = bench.submit([9, 9, 9])
    bench.run()
    assert bench.fault(request, 1) == "NOTHING_TO_SAMPLE"
    assert bench.output(request, 1) == []
    for key in [(request, 0), (request, 2), (other, 0)]:
        assert bench.output(*key) == bench.expected(*key)


def test_if_the_first_sequences_fail_the_others_compute_the_prompt():
    bench = EngineBench()
    bench.runner.faults |= {(5, 0), (5, 1)}
    request = bench.submit(PROMPT, n=4, seed=5)
    bench.run()
    assert [bench.ended(request, i) for i in range(4)] == [FinishReason.ERROR] * 2 + [FinishReason.LENGTH] * 2
    for sequence in (2, 3):
        assert bench.output(request, sequence) == bench.expected(request, sequence)


@step_by_step
def test_times_and_logprobs():
    bench = EngineBench(max_batch_size=1, max_tokens_per_step=4)
    bench.submit(PROMPT, max_tokens=3)
    request = bench.submit(list(range(20, 31)), max_tokens=4, logprobs=0)
    bench.run()
    times = bench.stream(request).end.times
    assert times.queue == pytest.approx(0.04)
    assert times.context == pytest.approx(0.02)
    assert times.generation == pytest.approx(0.03)
    assert bench.receiver.opens[request, 0].queue == pytest.approx(0.04)
    assert [-round(p.logprob * 97) for p in bench.stream(request).logprobs] == bench.output(request)
