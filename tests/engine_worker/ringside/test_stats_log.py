"""The journal between the engine and those who tell of it."""

import json
import sys
import threading

import pytest
import structlog

from engine_worker.hooks import Report
from engine_worker.ringside.stats_log import Cursor, StatsCallback, StatsLog, find_function
from sluice.ring.stats import RequestStats, Stage, StatsSource, StepStats

PATIENCE = 60
START = Cursor(0, 0)
SOURCE = StatsSource("e", "m", "v1")


def request_of(number: int, tokens: int) -> RequestStats:
    return RequestStats(number, "r", Stage.GENERATION, 1.0, 2.0, 3.0, 4.0, 5, 0, tokens, 0, 0, 0, 0)


def step_of(iteration: int, *requests: RequestStats) -> Report:
    return Report(StepStats(iteration=iteration), list(requests))


def iterations(news) -> list[int]:
    return [step.iteration for step in news.steps]


def test_each_reader_has_its_own_pace():
    stats_log = StatsLog()
    stats_log.append(step_of(1))
    late = stats_log.cursor()
    stats_log.append(step_of(2, request_of(1, 1)))
    stats_log.append(Report(None, [request_of(2, 1)]))
    first = stats_log.since(START)
    assert iterations(first) == [1, 2]
    assert [request.request for request in first.requests] == [1, 2]
    assert iterations(stats_log.since(late)) == [2]
    assert stats_log.since(first.cursor) == ([], [], first.cursor, START)


def test_every_report_of_a_request_is_there_and_which_is_the_latest():
    stats_log = StatsLog()
    for tokens in range(1, 4):
        stats_log.append(step_of(tokens, request_of(7, tokens), request_of(8, 9)))
    news = stats_log.since(START)
    assert [request.generated_tokens for request in news.requests] == [1, 9, 2, 9, 3, 9]
    assert [(request.request, request.generated_tokens) for request in news.latest_requests] == [(7, 3), (8, 9)]


def test_a_slow_reader_loses_the_oldest_and_learns_how_many():
    stats_log = StatsLog(capacity=3)
    for iteration in range(1, 6):
        stats_log.append(step_of(iteration, request_of(iteration, 1)))
    stats_log.append(Report(None, [request_of(6, 1)]))
    news = stats_log.since(START)
    assert (iterations(news), news.lost) == ([3, 4, 5], Cursor(steps=2, requests=3))
    assert [request.request for request in news.requests] == [4, 5, 6]
    assert stats_log.since(news.cursor).lost == START


def test_a_reader_in_another_thread_misses_nothing():
    stats_log, count, seen = StatsLog(capacity=10_000), 5000, []

    def read() -> None:
        cursor = START
        while len(seen) < count:
            news = stats_log.since(cursor)
            cursor = news.cursor
            seen.extend(iterations(news))

    reader = threading.Thread(target=read)
    reader.start()
    for iteration in range(count):
        stats_log.append(step_of(iteration))
    reader.join(PATIENCE)
    assert seen == list(range(count))


class Recorder:
    """A user's function that remembers, and can fail."""

    def __init__(self, wanted: int, fails: bool = False) -> None:
        self.texts: list[str] = []
        self.complete = threading.Event()
        self._wanted = wanted
        self._fails = fails

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        if len(self.texts) >= self._wanted:
            self.complete.set()
        if self._fails:
            raise RuntimeError("the user's function")


@pytest.mark.parametrize("fails", [False, True])
def test_a_function_gets_json_and_may_raise(fails):
    stats_log, recorder, logs = StatsLog(), Recorder(3, fails), []
    log = structlog.wrap_logger(None, processors=[lambda _, __, event: logs.append(event) or event, drop])
    callback = StatsCallback(recorder, SOURCE, lambda: True, stats_log, log)
    callback.start()
    stats_log.append(step_of(1))
    stats_log.append(step_of(2, request_of(7, 3)))
    assert recorder.complete.wait(PATIENCE)
    callback.stop()
    found = [json.loads(text) for text in recorder.texts]
    assert {(each["type"], each["engine_id"]) for each in found} == {("step", "e"), ("request", "e")}
    assert {each["model_version"] for each in found if each["type"] == "step"} == {"v1"}
    assert {each["draining"] for each in found if each["type"] == "step"} == {True}
    assert sorted(each["iteration"] for each in found if each["type"] == "step") == [1, 2]
    assert [each["generated_tokens"] for each in found if each["type"] == "request"] == [3]
    assert callback.errors == (3 if fails else 0)
    assert len(logs) == (1 if fails else 0)


def drop(_, __, event):
    raise structlog.DropEvent


def test_a_function_gets_each_report_of_a_request():
    stats_log, recorder = StatsLog(), Recorder(4)
    callback = StatsCallback(recorder, SOURCE, lambda: False, stats_log, structlog.get_logger())
    for tokens in range(4):
        stats_log.append(Report(None, [request_of(7, tokens)]))
    callback.start()
    assert recorder.complete.wait(PATIENCE)
    callback.stop()
    assert [json.loads(text)["generated_tokens"] for text in recorder.texts] == [0, 1, 2, 3]


def test_what_is_left_is_reported_at_the_end():
    stats_log, recorder = StatsLog(), Recorder(1)
    callback = StatsCallback(recorder, SOURCE, lambda: False, stats_log, structlog.get_logger())
    callback.start()
    stats_log.append(step_of(1))
    callback.stop()
    assert len(recorder.texts) == 1


def test_a_slow_function_misses_the_oldest_and_they_are_counted():
    stats_log, go, recorder = StatsLog(capacity=2), threading.Event(), Recorder(5)
    busy = threading.Event()

    def slow(text: str) -> None:
        busy.set()
        go.wait(PATIENCE)
        recorder(text)

    callback = StatsCallback(slow, SOURCE, lambda: False, stats_log, structlog.get_logger())
    callback.start()
    stats_log.append(step_of(1))
    assert busy.wait(PATIENCE)
    for iteration in range(2, 7):
        stats_log.append(step_of(iteration, request_of(iteration, 1), request_of(iteration, 2)))
    go.set()
    assert recorder.complete.wait(PATIENCE)
    callback.stop()
    found = [json.loads(text) for text in recorder.texts]
    assert [each["iteration"] for each in found if each["type"] == "step"] == [1, 5, 6]
    assert [each["generated_tokens"] for each in found if each["type"] == "request"] == [1, 2]
    assert (callback.lost_steps, callback.lost_requests) == (3, 8)


@pytest.mark.parametrize("name", ["json", "json:", ":dumps", "no_such_module:f", "json:nothing", "json:__name__"])
def test_a_wrong_name_is_reported(name):
    with pytest.raises(ValueError, match="stats_callback: "):
        find_function(name)


def test_a_function_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_statistics.py").write_text("def take(text): return text\n")
    monkeypatch.chdir(tmp_path)
    assert find_function("my_statistics:take")("x") == "x"
    assert str(tmp_path) not in sys.path
    sys.modules.pop("my_statistics")
