"""The journal between the engine and those who tell of it."""

import json
import sys
import threading

import pytest
import structlog

from engine_worker.callback import StatsCallback, find_function
from engine_worker.hooks import Report
from engine_worker.reports import Cursor, Reports
from sluice.ring.stats import RequestStats, Stage, StepStats

PATIENCE = 60
START = Cursor(0, 0)


def request_of(number: int, tokens: int) -> RequestStats:
    return RequestStats(number, "r", Stage.GENERATION, 1.0, 2.0, 3.0, 4.0, 5, 0, tokens, 0, 0, 0, 0)


def step_of(iteration: int, *requests: RequestStats) -> Report:
    return Report(StepStats(iteration=iteration), list(requests))


def iterations(news) -> list[int]:
    return [step.iteration for step in news.steps]


def test_each_reader_has_its_own_pace():
    reports = Reports()
    reports.put(step_of(1))
    late = reports.now()
    reports.put(step_of(2, request_of(1, 1)))
    reports.put(Report(None, [request_of(2, 1)]))
    first = reports.since(START)
    assert iterations(first) == [1, 2]
    assert [request.request for request in first.requests] == [1, 2]
    assert iterations(reports.since(late)) == [2]
    assert reports.since(first.cursor) == ([], [], first.cursor, 0)


def test_of_a_request_only_the_latest_is_told():
    reports = Reports()
    for tokens in range(1, 4):
        reports.put(step_of(tokens, request_of(7, tokens)))
    assert [request.generated_tokens for request in reports.since(START).requests] == [3]


def test_a_slow_reader_loses_the_oldest_and_learns_how_many():
    reports = Reports(capacity=3)
    for iteration in range(1, 6):
        reports.put(step_of(iteration, request_of(iteration, 1)))
    news = reports.since(START)
    assert (iterations(news), news.lost) == ([3, 4, 5], 2)
    assert [request.request for request in news.requests] == [3, 4, 5]
    assert reports.since(news.cursor).lost == 0


def test_a_reader_in_another_thread_misses_nothing():
    reports, count, seen = Reports(capacity=10_000), 5000, []

    def read() -> None:
        cursor = START
        while len(seen) < count:
            news = reports.since(cursor)
            cursor = news.cursor
            seen.extend(iterations(news))

    reader = threading.Thread(target=read)
    reader.start()
    for iteration in range(count):
        reports.put(step_of(iteration))
    reader.join(PATIENCE)
    assert seen == list(range(count))


class Told:
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
    reports, told, logs = Reports(), Told(3, fails), []
    log = structlog.wrap_logger(None, processors=[lambda _, __, event: logs.append(event) or event, drop])
    callback = StatsCallback(told, "e", reports, log)
    callback.start()
    reports.put(step_of(1))
    reports.put(step_of(2, request_of(7, 3)))
    assert told.complete.wait(PATIENCE)
    callback.stop()
    found = [json.loads(text) for text in told.texts]
    assert {(each["type"], each["engine"]) for each in found} == {("step", "e"), ("request", "e")}
    assert sorted(each["iteration"] for each in found if each["type"] == "step") == [1, 2]
    assert [each["generated_tokens"] for each in found if each["type"] == "request"] == [3]
    assert callback.errors == (3 if fails else 0)
    assert len(logs) == (1 if fails else 0)


def drop(_, __, event):
    raise structlog.DropEvent


def test_what_is_left_is_told_at_the_end():
    reports, told = Reports(), Told(1)
    callback = StatsCallback(told, "e", reports, structlog.get_logger())
    callback.start()
    reports.put(step_of(1))
    callback.stop()
    assert len(told.texts) == 1


def test_a_slow_function_misses_steps_and_they_are_counted():
    reports, go, told = Reports(capacity=2), threading.Event(), Told(3)
    busy = threading.Event()

    def slow(text: str) -> None:
        busy.set()
        go.wait(PATIENCE)
        told(text)

    callback = StatsCallback(slow, "e", reports, structlog.get_logger())
    callback.start()
    reports.put(step_of(1))
    assert busy.wait(PATIENCE)
    for iteration in range(2, 7):
        reports.put(step_of(iteration))
    go.set()
    assert told.complete.wait(PATIENCE)
    callback.stop()
    assert [json.loads(text)["iteration"] for text in told.texts] == [1, 5, 6]
    assert callback.lost == 3


@pytest.mark.parametrize("name", ["json", "json:", ":dumps", "no_such_module:f", "json:nothing", "json:__name__"])
def test_a_wrong_name_is_told(name):
    with pytest.raises(ValueError, match="stats_callback: "):
        find_function(name)


def test_a_function_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_statistics.py").write_text("def take(text): return text\n")
    monkeypatch.chdir(tmp_path)
    assert find_function("my_statistics:take")("x") == "x"
    assert str(tmp_path) not in sys.path
    sys.modules.pop("my_statistics")
