"""Requests with postponed draws, for example because a new guide worker has not compiled their guide yet."""

import pytest

from sluice.wire.errors import ErrorCode, Fault, FinishReason
from sluice.wire.params import BeamSearchParams, Speculation
from tests.engine_worker.core.test_beams import check
from tests.engine_worker.core.test_preparation import Making
from tests.fakes.engine import EngineBench

pytestmark = pytest.mark.usefixtures("both_overlaps")
PROMPT = [1, 2, 3, 4, 5]


def postponed(bench: EngineBench, after: int = 4, **fields) -> tuple[int, Making]:
    """A request whose draws are postponed after `after` steps, and its preparation."""
    request = bench.submit(PROMPT, 20, seed=7, **fields)
    for _ in range(after):
        bench.step()
    making = bench.runner.preparations[request] = Making()
    bench.runner.unready.add(7)
    bench.step()
    bench.step()
    return request, making


def is_held(bench: EngineBench, request: int) -> bool:
    return not any(sequence.request.submit.request == request for sequence in bench.engine.live.active)


def ready(bench: EngineBench, making: Making) -> None:
    bench.runner.unready.clear()
    making.end()


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"speculation": Speculation(max_draft_tokens=3)}])
def test_postponed_sequences_wait_and_have_the_same_tokens(after, fields):
    bench = EngineBench()
    request, making = postponed(bench, after, **fields)
    neighbour = bench.submit([7, 8], 12)
    for _ in range(20):
        bench.step()
    assert bench.output(neighbour) == bench.expected(neighbour)
    assert is_held(bench, request)
    assert bench.engine.intake.preparing
    ready(bench, making)
    bench.run()
    for i in range(bench.specs[request, 0].n):
        assert bench.output(request, i) == bench.expected(request, i)


def test_accepted_drafts_of_a_postponed_sequence():
    bench = EngineBench()
    expected = EngineBench()
    twin = expected.submit(PROMPT, 20, seed=7)
    drafts = Speculation(draft_token_ids=tuple(expected.expected(twin)))
    request, making = postponed(bench, 6, speculation=drafts)
    assert is_held(bench, request)
    ready(bench, making)
    bench.run()
    assert bench.output(request) == bench.expected(request)
    assert bench.engine.stats.accepted_draft_tokens > 0


def test_a_request_without_preparation_continues_immediately():
    bench = EngineBench()
    request, _ = postponed(bench)
    bench.runner.unready.clear()
    second = bench.submit(PROMPT, 20, seed=7)
    for _ in range(3):
        bench.step()
    bench.runner.unready.add(7)
    bench.step()
    bench.runner.unready.clear()
    assert is_held(bench, request)
    while second in bench.engine.live.requests:
        bench.step()
    assert bench.output(second) == bench.expected(second)


@pytest.mark.parametrize("after", [0, 2, 5])
def test_beams(after):
    bench = EngineBench(max_batch_size=16)
    request, making = postponed(bench, after, n=2, beams=BeamSearchParams(3))
    assert is_held(bench, request)
    ready(bench, making)
    bench.run()
    check(bench, request)


def test_a_failed_preparation_ends_a_postponed_request():
    bench = EngineBench()
    request, making = postponed(bench, n=2)
    making.end(Fault(ErrorCode.STEP_FAILED.name, "killed"))
    bench.run()
    assert [bench.fault(request, i) for i in range(2)] == ["STEP_FAILED"] * 2


def test_a_postponed_request_can_be_cancelled():
    bench = EngineBench()
    request, making = postponed(bench, n=2)
    bench.cancel(request)
    bench.step()
    assert making.withdrawn == 1
    assert [bench.ended(request, i) for i in range(2)] == [FinishReason.ABORTED] * 2
