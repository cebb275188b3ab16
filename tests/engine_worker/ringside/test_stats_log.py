"""The log of statistics, its readers, and the thread that calls a user's function."""

import json
import threading

import pytest
import structlog

from engine_worker.hooks import Report
from engine_worker.ringside.stats_log import Cursor, StatsCallback, StatsLog
from sluice.wire.stats import RequestProgress, Stage, StatsSource, StepStats

PATIENCE = 60
START = Cursor(0, 0)
SOURCE = StatsSource("e", "m", "v1", 8)


def request_of(number: int, tokens: int) -> RequestProgress:
    return RequestProgress(number, "r", Stage.GENERATION, 1.0, 2.0, 3.0, 4.0, 5, 0, tokens, 0, 0, 0, 0)


def step_of(iteration: int, *requests: RequestProgress) -> Report:
    return Report(StepStats(iteration=iteration), list(requests))


def iterations(new) -> list[int]:
    return [step.iteration for step in new.steps]


def test_each_reader_has_its_own_position():
    stats_log = StatsLog()
    stats_log.append(step_of(1))
    second_reader = stats_log.cursor()
    stats_log.append(step_of(2, request_of(1, 1)))
    stats_log.append(Report(None, [request_of(2, 1)]))
    first = stats_log.since(START)
    assert iterations(first) == [1, 2]
    assert [request.request for request in first.requests] == [1, 2]
    assert iterations(stats_log.since(second_reader)) == [2]
    assert stats_log.since(first.cursor) == ([], [], first.cursor, START)


def test_a_reader_gets_every_report_of_a_request_and_the_latest_one():
    stats_log = StatsLog()
    for tokens in range(1, 4):
        stats_log.append(step_of(tokens, request_of(7, tokens), request_of(8, 9)))
    new = stats_log.since(START)
    assert [request.generated_tokens for request in new.requests] == [1, 9, 2, 9, 3, 9]
    assert [(request.request, request.generated_tokens) for request in new.latest_requests] == [(7, 3), (8, 9)]


def test_a_slow_reader_loses_the_oldest_reports_and_gets_their_number():
    stats_log = StatsLog(capacity=3)
    for iteration in range(1, 6):
        stats_log.append(step_of(iteration, request_of(iteration, 1)))
    stats_log.append(Report(None, [request_of(6, 1)]))
    new = stats_log.since(START)
    assert (iterations(new), new.lost) == ([3, 4, 5], Cursor(steps=2, requests=3))
    assert [request.request for request in new.requests] == [4, 5, 6]
    assert stats_log.since(new.cursor).lost == START


def test_a_reader_in_another_thread_gets_every_step():
    stats_log, count, received = StatsLog(capacity=10_000), 5000, []

    def read() -> None:
        cursor = START
        while len(received) < count:
            new = stats_log.since(cursor)
            cursor = new.cursor
            received.extend(iterations(new))

    reader = threading.Thread(target=read)
    reader.start()
    for iteration in range(count):
        stats_log.append(step_of(iteration))
    reader.join(PATIENCE)
    assert received == list(range(count))


class Recorder:
    """A user's function that records its calls, and can raise. `complete` is set after `expected` calls."""

    def __init__(self, expected: int, error: BaseException | None = None) -> None:
        self.texts: list[str] = []
        self.complete = threading.Event()
        self._expected = expected
        self._error = error

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        if len(self.texts) >= self._expected:
            self.complete.set()
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [None, RuntimeError(), SystemExit(3), KeyboardInterrupt()])
def test_a_function_gets_json_and_may_raise(error):
    stats_log, recorder, logs = StatsLog(), Recorder(3, error), []
    log = structlog.wrap_logger(None, processors=[lambda _, __, event: logs.append(event) or event, drop])
    callback = StatsCallback(recorder, SOURCE, lambda: True, stats_log, log)
    callback.start()
    stats_log.append(step_of(1))
    stats_log.append(step_of(2, request_of(7, 3)))
    assert recorder.complete.wait(PATIENCE)
    callback.stop()
    reports = [json.loads(text) for text in recorder.texts]
    assert {(report["type"], report["engine_id"]) for report in reports} == {("step", "e"), ("request", "e")}
    steps = [report for report in reports if report["type"] == "step"]
    assert {(step["model_version"], step["draining"]) for step in steps} == {("v1", True)}
    assert sorted(step["iteration"] for step in steps) == [1, 2]
    assert [report["generated_tokens"] for report in reports if report["type"] == "request"] == [3]
    assert callback.errors == (3 if error else 0)
    assert len(logs) == (1 if error else 0)


def drop(_, __, event):
    raise structlog.DropEvent


def test_a_function_gets_every_report_of_a_request():
    stats_log, recorder = StatsLog(), Recorder(4)
    callback = StatsCallback(recorder, SOURCE, lambda: False, stats_log, structlog.get_logger())
    for tokens in range(4):
        stats_log.append(Report(None, [request_of(7, tokens)]))
    callback.start()
    assert recorder.complete.wait(PATIENCE)
    callback.stop()
    assert [json.loads(text)["generated_tokens"] for text in recorder.texts] == [0, 1, 2, 3]


def test_remaining_reports_are_delivered_at_the_end():
    stats_log, recorder = StatsLog(), Recorder(1)
    callback = StatsCallback(recorder, SOURCE, lambda: False, stats_log, structlog.get_logger())
    callback.start()
    stats_log.append(step_of(1))
    callback.stop()
    assert len(recorder.texts) == 1


def test_reports_lost_by_a_slow_function_are_counted():
    stats_log, may_continue, recorder = StatsLog(capacity=2), threading.Event(), Recorder(5)
    busy = threading.Event()

    def slow(text: str) -> None:
        busy.set()
        may_continue.wait(PATIENCE)
        recorder(text)

    callback = StatsCallback(slow, SOURCE, lambda: False, stats_log, structlog.get_logger())
    callback.start()
    stats_log.append(step_of(1))
    assert busy.wait(PATIENCE)
    for iteration in range(2, 7):
        stats_log.append(step_of(iteration, request_of(iteration, 1), request_of(iteration, 2)))
    may_continue.set()
    assert recorder.complete.wait(PATIENCE)
    callback.stop()
    reports = [json.loads(text) for text in recorder.texts]
    assert [report["iteration"] for report in reports if report["type"] == "step"] == [1, 5, 6]
    assert [report["generated_tokens"] for report in reports if report["type"] == "request"] == [1, 2]
    assert (callback.lost_steps, callback.lost_requests) == (3, 8)
