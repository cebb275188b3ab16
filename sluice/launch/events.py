"""What the launcher itself has to tell of a service, as lines of a log."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sluice.launch.gpus import Gpus
from sluice.launch.logs import LogLine

ENDED = "ended"
SERVES_AGAIN = "serves again"
ON_GPUS = "on gpus"
OUTPUT = "output"
LINES_LOST = "log lines lost"


def on_gpus(name: str, gpus: Gpus) -> LogLine:
    """Which this engine gets; a warning where it shares them."""
    level = "info" if gpus.engines == 1 else "warning"
    return _line(name, ON_GPUS, level, gpus=",".join(gpus.names), engines_on_each=gpus.engines)


def ended(name: str, pid: int, ending: str, restart_in: float | None) -> LogLine:
    """It has ended by itself; None: it is given up."""
    then: dict[str, Any] = {"given_up": True} if restart_in is None else {"restart_in": restart_in}
    return _line(name, ENDED, "error" if restart_in is None else "warning", pid=pid, how=ending, **then)


def serves_again(name: str, pid: int) -> LogLine:
    """It was started again, and listens."""
    return _line(name, SERVES_AGAIN, "info", pid=pid)


def of_launcher(event: str, level: str, fields: Mapping[str, Any]) -> LogLine:
    """Of the launcher itself and no service."""
    return _line("launcher", event, level, **fields)


def output(line: LogLine) -> LogLine:
    """What a service has written past its logger, such as a line of a traceback."""
    return _line(line.child, OUTPUT, "warning", text=line.text)


def lines_lost(lines: int) -> str:
    """The launcher's own output was full, closed, or not read for a while."""
    return _line("launcher", LINES_LOST, "warning", lines=lines).text


def _line(name: str, event: str, level: str, **fields: Any) -> LogLine:
    time = datetime.now(UTC).isoformat()
    found = {"service": "launcher", "id": name, **fields, "event": event, "level": level, "timestamp": time}
    return LogLine(name, json.dumps(found), found)
