"""The lines of the services' logs that are shown on a terminal and to a log collector."""

import io
import json

import pytest
from rich.console import Console

from sluice.launch import DEMO_REQUEST, Display
from sluice.launch.logs import launcher_line, parse_line, service_exited


def show(lines: list[str], terminal: bool, verbose: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200, color_system=None)
    with Display(verbose, console) as display:
        for line in lines:
            display(parse_line("engine-0", line))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line(event: str, level: str = "info", **fields: object) -> str:
    return json.dumps({"event": event, "level": level, "timestamp": "2026-01-02T03:04:05Z", "service": "x", **fields})


@pytest.mark.parametrize("terminal", [True, False])
def test_requests_and_problems_are_shown(terminal: bool) -> None:
    shown = show(
        [line("detail"), line("odd", "warning", queue=5), line("request_ended", outcome="ok"), "Traceback …", "[1]"],
        terminal,
    )
    assert "detail" not in shown
    for expected in ("odd", "request", "Traceback", "[1]"):
        assert expected in shown
    assert "detail" in show([line("detail")], terminal, verbose=True)


def test_json_passes_through_without_a_terminal() -> None:
    lines = [line("request_ended", text="[bold]x[/bold]"), line("loading", done=1, total=2)]
    assert show(lines, terminal=False).splitlines() == lines


def test_every_line_is_json_without_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with Display(False, console) as display:
        for written in ("Traceback …", "[1]", line("request_ended")):
            display(parse_line("engine-0", written))
        display.say("starting", "starting …", fields={"engines": 2})
        display.show_error("it\nbroke")
    assert isinstance(console.file, io.StringIO)
    lines = [json.loads(written) for written in console.file.getvalue().splitlines()]
    assert [each["event"] for each in lines] == ["output", "output", "request_ended", "starting", "failed"]
    assert [each.get("text") for each in lines[:2]] == ["Traceback …", "[1]"]
    assert lines[0]["id"] == "engine-0"
    assert (lines[3]["service"], lines[3]["engines"]) == ("launcher", 2)
    assert (lines[4]["level"], lines[4]["error"]) == ("error", "it broke")


@pytest.mark.parametrize("terminal", [True, False])
def test_start_failed_of_a_service_is_not_shown(terminal: bool) -> None:
    written = [line("start_failed", "error", error="no model")]
    assert show(written, terminal) == ""
    assert "no model" in show(written, terminal, verbose=True)


def test_a_terminal_shows_short_lines() -> None:
    shown = show([line("odd", "warning", queue=5, seconds=0.123456, text="[bold]x[/bold]")], terminal=True)
    assert "warning engine-0 odd queue=5 seconds=0.123 text=[bold]x[/bold]" in shown
    assert "{" not in shown


def test_loading_is_shown_as_a_bar() -> None:
    shown = show([line("loading", done=done, total=4) for done in range(5)], terminal=True)
    assert "loading engine-0" in shown
    assert "100 %" in shown


def test_capturing_is_shown_as_another_bar() -> None:
    lines = [line("loading", done=4, total=4), line("capturing", done=0, total=9), line("capturing", done=9, total=9)]
    shown = show(lines, terminal=True)
    assert "loading engine-0" in shown
    assert "capturing engine-0" in shown


def test_loading_of_unknown_length() -> None:
    assert "loading engine-0" in show([line("loading", done=0, total=0), line("loading")], terminal=True)


def test_exits_and_recoveries_are_one_line_each() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    with Display(False, console) as display:
        display(service_exited("engine-0", 12, "was killed by SIGKILL", 0.2))
        display(launcher_line("engine-0", "service_recovered", "info", pid=13))
        display(service_exited("engine-0", 13, "ended with code 1", None))
    assert isinstance(console.file, io.StringIO)
    assert [line.split(" ", 1)[1] for line in console.file.getvalue().splitlines()] == [
        "warning engine-0 service_exited pid=12 how=was killed by SIGKILL restart_in=0.2",
        "engine-0 service_recovered pid=13",
        "error engine-0 service_exited pid=13 how=ended with code 1 given_up=True",
    ]


def test_requests_are_one_short_line() -> None:
    fields = {
        "prompt_tokens": 12,
        "cached_tokens": 8,
        "completion_tokens": 96,
        "seconds": 0.81234,
        "engine": "engine-0",
    }
    request = line("request_ended", request_id="r1", outcome="EOS", first_token_seconds=0.0123, **fields)
    demo = line("request_ended", request_id=DEMO_REQUEST, outcome="EOS")
    shown = show([request, demo, line("request_ended", outcome="MODEL_NOT_FOUND")], terminal=True)
    assert DEMO_REQUEST not in shown
    assert "request r1 EOS · 12 prompt tokens (8 cached), 96 new · first token after 0.0123 s · 0.812 s\n" in shown
    assert "request (refused) MODEL_NOT_FOUND\n" in shown


def test_a_request_of_the_gateway() -> None:
    fields = {"method": "POST", "path": "/v1/completions", "status": 404, "reason": "model_not_found", "tenant": "ann"}
    shown = show([line("request_ended", "warning", seconds=0.0123, **fields)], terminal=True)
    assert "POST /v1/completions 404 model_not_found · ann · 0.0123 s\n" in shown
