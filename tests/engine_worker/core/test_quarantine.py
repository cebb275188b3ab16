"""A quarantined request runs alone: others are ended and refused until it has sampled some tokens."""

import pytest

from engine_worker.core.quarantine import HOLD_SECONDS
from sluice.wire.errors import FinishReason
from sluice.wire.requests import PROBATION_TOKENS
from tests.fakes.engine import EngineBench

pytestmark = pytest.mark.usefixtures("both_overlaps")


def submit_alone(bench, prompt, max_tokens=20, **fields):
    request = bench.submit(prompt, max_tokens, alone=True, **fields)
    bench.step()
    return request


def quarantined(bench):
    return bench.engine.intake.quarantine.refresh()


def test_other_requests_are_refused_until_its_first_tokens():
    bench = EngineBench()
    before = bench.submit([1, 2], 50)
    bench.step()
    bench.step()
    alone = submit_alone(bench, [3])
    assert bench.fault(before) == "QUARANTINE"
    assert bench.output(before) == bench.expected(before)[: len(bench.output(before))]
    assert quarantined(bench) == alone
    bench.clock.now += HOLD_SECONDS
    refused = bench.submit([4])
    bench.step()
    assert bench.fault(refused) == "QUARANTINE"
    while len(bench.output(alone)) <= PROBATION_TOKENS:
        assert quarantined(bench) == alone
        bench.step()
    assert quarantined(bench) is None
    after = bench.submit([5])
    bench.run()
    for request in (alone, after):
        assert bench.output(request) == bench.expected(request)
    bench.check()


def test_nothing_is_computed_before_a_heartbeat_names_it():
    bench = EngineBench()
    alone = submit_alone(bench, [3])
    assert not bench.step()
    assert bench.engine.intake.quarantine.holder == alone
    assert bench.runner.computed == 0
    bench.clock.now += HOLD_SECONDS
    assert bench.step()


@pytest.mark.parametrize("end", ["cancel", "length", "time limit"])
def test_quarantine_ends_with_its_request(end):
    bench = EngineBench()
    alone = submit_alone(bench, [3], 2 if end == "length" else 20, time_limit=0.01 if end == "time limit" else None)
    if end == "cancel":
        bench.cancel(alone)
    bench.clock.now += HOLD_SECONDS
    while bench.engine.live.requests:
        bench.step()
    assert quarantined(bench) is None
    next_one = submit_alone(bench, [4])
    assert quarantined(bench) == next_one


def test_a_second_suspect_request_is_refused_meanwhile():
    bench = EngineBench()
    first = submit_alone(bench, [3])
    second = submit_alone(bench, [4])
    assert bench.fault(second) == "QUARANTINE"
    assert quarantined(bench) == first


def test_resumed_tokens_do_not_count_for_probation():
    bench = EngineBench()
    expected = EngineBench()
    whole = expected.submit([3], 20)
    expected.run()
    resume = {0: expected.output(whole)[:10]}
    alone = submit_alone(bench, [3], resume=resume)
    assert quarantined(bench) == alone
    bench.clock.now += HOLD_SECONDS
    bench.run()
    assert bench.ended(alone) is FinishReason.LENGTH
    assert quarantined(bench) is None
