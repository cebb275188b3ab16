"""Shows the log of services and launcher on stderr: readable text on a terminal, otherwise JSON lines."""

import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from sluice.host.process import START_FAILED
from sluice.launch.logs import LAUNCHER, SERVICE_RECOVERED, LogLine, launcher_line

BARS = ("loading", "capturing")
SHOWN_EVENTS = (*BARS, "request_ended", SERVICE_RECOVERED)
STYLES = {"warning": "yellow", "error": "red", "critical": "bold red"}
DEMO_REQUEST = "sluice-serve-demo"
"""Id of the request of `sluice serve --demo`. Its log line is not shown on a terminal, which shows its output."""
UNSHOWN_FIELDS = ("event", "level", "timestamp", "service", "id")


class Display:
    """An `Observe` for a ring, and a context manager. Unless `verbose`, shows only loading, requests and problems."""

    def __init__(self, verbose: bool = False, console: Console | None = None) -> None:
        self._verbose = verbose
        self._console = console or Console(file=sys.stderr)
        name, percentage = TextColumn("{task.description}"), TextColumn("{task.percentage:>3.0f} %")
        columns = (name, BarColumn(), percentage, TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._bars: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def __call__(self, line: LogLine) -> None:
        # A service's `start_failed` is not shown, since the launcher's line about it contains the reason.
        is_shown = (line.is_problem and line.event != START_FAILED) or line.event in SHOWN_EVENTS
        if not (self._verbose or is_shown):
            return
        if not self._console.is_terminal:
            # A line that did not come from the service's logger, such as part of a traceback, is wrapped in JSON.
            self._write(line if line.fields else launcher_line(line.child, "output", "warning", text=line.text))
        elif line.event in BARS:
            with self._lock:
                self._show_bar(line)
        elif line.fields.get("request_id") != DEMO_REQUEST:
            self._console.print(_readable(line), highlight=False, soft_wrap=True)

    def say(self, event: str, text: str, level: str = "info", fields: Mapping[str, Any] = {}) -> None:
        """Show `text` on a terminal, otherwise a JSON line with `fields`."""
        if self._console.is_terminal:
            self._console.print(text, style=STYLES.get(level, "dim"), highlight=False, markup=False, soft_wrap=True)
        else:
            self._write(launcher_line(LAUNCHER, event, level, **fields))

    def show_error(self, message: str, event: str = "failed") -> None:
        message = " ".join(message.split())
        self.say(event, f"error: {message}", "error", {"error": message})

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._progress.stop()

    def _write(self, line: LogLine) -> None:
        print(line.text, file=self._console.file, flush=True)

    def _show_bar(self, line: LogLine) -> None:
        name = f"{line.event} {line.child}"
        done, total = float(line.fields.get("done", 0)), float(line.fields.get("total", 0))
        self._progress.start()
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._bars[name], completed=done, total=total)
        if all(task.finished for task in self._progress.tasks):
            self._progress.stop()


def _readable(line: LogLine) -> Text:
    if not line.fields:
        return Text(f"{line.child}: {line.text}", style="dim")
    level = str(line.fields.get("level", ""))
    if line.event == "request_ended":
        describe = describe_http_request if "method" in line.fields else describe_request
        return Text(f"{_clock(line.fields)} {describe(line.fields)}", style=STYLES.get(level, "dim"))
    details = [f"{key}={_short(value)}" for key, value in line.fields.items() if key not in UNSHOWN_FIELDS]
    words = [_clock(line.fields), *([level] if level in STYLES else []), line.child, line.event, *details]
    return Text(" ".join(words), style=STYLES.get(level, "dim"))


def describe_request(fields: Mapping[str, Any]) -> str:
    """The fields of the router's `request_ended` event as readable text."""
    parts = [f"request {fields.get('request_id') or '(refused)'} {fields.get('outcome', '')}"]
    if "prompt_tokens" in fields:
        cached = f" ({fields['cached_tokens']} cached)" if fields.get("cached_tokens") else ""
        parts.append(f"{fields['prompt_tokens']} prompt tokens{cached}, {fields.get('completion_tokens', 0)} new")
    if fields.get("first_token_seconds") is not None:
        parts.append(f"first token after {_short(fields['first_token_seconds'])} s")
    if "seconds" in fields:
        parts.append(f"{_short(fields['seconds'])} s")
    return " · ".join(parts)


def describe_http_request(fields: Mapping[str, Any]) -> str:
    """The fields of the gateway's `request_ended` event as readable text."""
    names = ("method", "path", "status", "reason")
    request = " ".join(str(fields[name]) for name in names if name in fields)
    tenant = [str(fields["tenant"])] if "tenant" in fields else []
    return " · ".join([request, *tenant, f"{_short(fields.get('seconds', 0.0))} s"])


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _clock(fields: Mapping[str, Any]) -> str:
    try:
        return datetime.fromisoformat(str(fields.get("timestamp"))).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return datetime.now().astimezone().strftime("%H:%M:%S")
