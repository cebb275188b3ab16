"""Requests that wait for their preparation, such as the compilation of a guide, before they compete for memory."""

import pytest

from sluice.wire.errors import ErrorCode, Fault, FinishReason
from tests.fakes.engine import EngineBench

pytestmark = pytest.mark.usefixtures("both_overlaps")
FAULT = Fault(ErrorCode.INVALID_ARGUMENT.name, "unclosed group", "spec.guided.regex")


class Making:
    def __init__(self) -> None:
        self.done, self.fault, self.ended, self.withdrawn = False, None, False, 0

    def withdraw(self) -> None:
        self.withdrawn += 1

    def end(self, fault: Fault | None = None) -> None:
        self.ended, self.fault = True, fault

    def poll(self) -> bool:
        self.done = self.ended
        return self.done


def waiting(bench: EngineBench, **fields) -> tuple[int, Making]:
    making = Making()
    bench.runner.preparations[len(bench.specs) + 1] = making
    request = bench.submit([1, 2, 3, 4, 5], **fields)
    bench.step()
    return request, making


def test_a_request_waits_for_its_preparation_without_memory():
    bench = EngineBench()
    request, making = waiting(bench, n=2)
    neighbour = bench.submit([7, 8])
    for _ in range(20):
        bench.step()
    assert bench.output(neighbour) == bench.expected(neighbour)
    assert (request, 0, 0) not in bench.receiver.streams
    assert not bench.engine.live.active
    assert bench.engine.intake.preparing
    making.end()
    bench.run()
    assert [bench.output(request, i) for i in range(2)] == [bench.expected(request, i) for i in range(2)]
    assert not bench.engine.intake.preparing


def test_a_failed_preparation_ends_the_request():
    bench = EngineBench()
    request, making = waiting(bench, n=2)
    making.end(FAULT)
    bench.run()
    assert [bench.fault(request, i) for i in range(2)] == ["INVALID_ARGUMENT"] * 2
    assert bench.receiver.opens[request, 0].n == 2


def test_a_preparation_that_has_already_failed_refuses_the_request():
    bench = EngineBench()
    making = Making()
    making.end(FAULT)
    bench.runner.preparations[1] = making
    request = bench.submit([1])
    bench.step()
    assert bench.fault(request) == "INVALID_ARGUMENT"
    assert bench.engine.live.num_begun == 0


@pytest.mark.parametrize("how", ["cancel", "expire", "drain"])
def test_a_request_can_end_while_it_waits(how):
    bench = EngineBench()
    request, making = waiting(bench, n=2, time_limit=5.0)
    if how == "cancel":
        bench.cancel(request)
        bench.step()
    elif how == "expire":
        bench.clock.now += 6.0
        bench.step()
    else:
        bench.engine.end_all(Fault(ErrorCode.DRAINING.name, "the engine has shut down"))
        bench.step()
    expected = {"cancel": FinishReason.ABORTED, "expire": FinishReason.TIME_LIMIT, "drain": FinishReason.ERROR}[how]
    assert [bench.ended(request, i) for i in range(2)] == [expected] * 2
    assert making.withdrawn == 1
    making.end()
    bench.run()
    assert not bench.engine.intake.preparing
    assert not bench.engine.live.requests


def test_one_sequence_can_be_cancelled_while_its_request_waits():
    bench = EngineBench()
    request, making = waiting(bench, n=3)
    bench.cancel(request, 0)
    bench.step()
    making.end()
    bench.run()
    assert bench.ended(request, 0) is FinishReason.ABORTED
    assert [bench.output(request, i) for i in (1, 2)] == [bench.expected(request, i) for i in (1, 2)]


def test_resumed_sequences_wait_too():
    bench = EngineBench()
    request = bench.submit([1, 2, 3, 4, 5], n=3, request=99)
    bench.run()
    outputs = [bench.expected(request, i) for i in range(3)]
    making = Making()
    bench.runner.preparations[100] = making
    resumed = bench.submit([1, 2, 3, 4, 5], n=3, request=100, resume={1: outputs[1][:3], 2: outputs[2]})
    bench.step()
    bench.step()
    assert not bench.engine.live.active
    making.end()
    bench.run()
    assert [bench.output(resumed, i) for i in range(2)] == outputs[:2]
    assert bench.ended(resumed, 2) is FinishReason.LENGTH


def test_quarantined_requests_wait_too():
    bench = EngineBench()
    neighbour = bench.submit([7, 8])
    bench.step()
    request, making = waiting(bench, alone=True)
    assert bench.fault(neighbour) == "QUARANTINE"
    bench.clock.now += 1.0
    bench.step()
    assert not bench.engine.live.active
    making.end()
    bench.run()
    assert bench.output(request) == bench.expected(request)
