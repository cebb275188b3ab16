"""The engine's core as a library: four callables and a runner, without the ring."""

from itertools import count

import structlog

from engine_worker.core.engine import Engine
from engine_worker.core.refusals import EngineLimits
from engine_worker.hooks import Hooks, Stop
from sluice.settings.engine import Batching
from sluice.wire.errors import FinishReason
from sluice.wire.stats import Stage
from tests.fakes.engine import spec_of
from tests.fakes.runner import ScriptedRunner
from tests.fakes.scripted_tokens import VOCAB, continuation


class Driver:
    """An engine whose hooks are connected to lists."""

    def __init__(self, max_requests: int = 4) -> None:
        self.requests, self.stops, self.responses, self.reports = [], [], [], []
        hooks = Hooks(
            get_requests=lambda n: [self.requests.pop(0) for _ in range(min(n, len(self.requests)))],
            send_responses=lambda responses: self.responses.append(responses),
            poll_stop_ids=lambda: [self.stops.pop() for _ in range(len(self.stops))],
            report_stats=lambda report: self.reports.append(report),
        )
        ticks = count()
        self.engine = Engine(
            ScriptedRunner(num_blocks=32, tokens_per_block=4),
            EngineLimits("fingerprint", VOCAB, max_sequence_tokens=100, max_requests=max_requests),
            Batching(max_batch_size=4, max_tokens_per_step=16),
            hooks,
            lambda: float(next(ticks)),
            structlog.get_logger(),
        )

    def run(self) -> None:
        while self.engine.step() or self.requests:
            pass

    def rows(self, request: int) -> list:
        return [row for responses in self.responses for row in responses.rows if row.request == request]

    def tokens(self, request: int) -> list[int]:
        return [token for row in self.rows(request) for token in row.tokens]

    def ends(self, request: int) -> list[FinishReason]:
        return [row.end.reason for row in self.rows(request) if row.end]

    def refused(self) -> list[tuple[int, str]]:
        return [(spec.request, fault.code) for responses in self.responses for spec, fault in responses.refused]


def test_rows_and_statistics_of_requests():
    driver = Driver()
    specs = [spec_of(range(i, i + 9), max_tokens=5, request=i) for i in range(1, 4)]
    driver.requests += specs
    driver.run()
    for spec in specs:
        assert driver.tokens(spec.request) == continuation(spec.prompt, spec.stopping)
        assert driver.ends(spec.request) == [FinishReason.LENGTH]
    opened = [opened.request for responses in driver.responses for opened in responses.opened]
    assert opened == [spec.request for spec in specs]
    steps = [report.step for report in driver.reports if report.step]
    assert [step.iteration for step in steps] == list(range(1, len(steps) + 1))
    assert steps[0].context_requests == 2
    ended = [request for report in driver.reports for request in report.requests if request.stage is Stage.ENDED]
    assert [(request.request, request.generated_tokens) for request in ended] == [(1, 5), (2, 5), (3, 5)]
    assert driver.engine.stats.latest.active_requests == 0


def test_no_more_requests_are_fetched_than_there_is_room_for():
    driver = Driver(max_requests=2)
    driver.requests += [spec_of([i], max_tokens=3, request=i) for i in range(1, 8)]
    while driver.requests or driver.engine.live.requests:
        driver.engine.step()
        assert len(driver.engine.live.requests) <= 2
    assert [driver.ends(i) for i in range(1, 8)] == [[FinishReason.LENGTH]] * 7
    assert driver.refused() == []


def test_a_number_in_use_is_refused_until_its_request_has_ended():
    driver = Driver()
    driver.requests.append(spec_of([1, 2], max_tokens=4, request=7))
    driver.engine.step()
    driver.requests.append(spec_of([3, 4], max_tokens=4, request=7))
    driver.run()
    assert driver.refused() == [(7, "DUPLICATE_REQUEST")]
    first = spec_of([1, 2], max_tokens=4)
    assert driver.tokens(7) == continuation(first.prompt, first.stopping)
    driver.responses.clear()
    driver.requests.append(spec_of([3, 4], max_tokens=4, request=7))
    driver.run()
    assert driver.tokens(7) == continuation([3, 4], first.stopping)
    assert driver.ends(7) == [FinishReason.LENGTH]


def test_a_stopped_request_ends_once():
    driver = Driver()
    driver.requests += [spec_of([1], max_tokens=50, request=1, n=2), spec_of([2], max_tokens=3, request=2)]
    driver.stops.append(Stop(1, 0, 1))
    driver.engine.step()
    driver.stops += [Stop(1, 0), Stop(1, 0), Stop(9, 0)]
    driver.run()
    assert driver.ends(1) == [FinishReason.ABORTED] * 2
    assert driver.ends(2) == [FinishReason.LENGTH]
    assert driver.engine.intake.unknown_stops == 2
