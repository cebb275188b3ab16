"""Log lines of a ring: the lines that services write, and the launcher's lines about services."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sluice.host.process import START_FAILED

LAUNCHER = "launcher"
SERVICE_RECOVERED = "service_recovered"


@dataclass(frozen=True, slots=True)
class LogLine:
    """One log line of a service or of the launcher."""

    child: str
    """Name of the service, such as "engine-0"."""
    text: str
    fields: dict[str, Any] = field(default_factory=dict)
    """The JSON object that structlog wrote. Empty for a line that did not come from the logger."""

    @property
    def event(self) -> str:
        """Name of the event. Empty for a line that did not come from the logger."""
        return str(self.fields.get("event", ""))

    @property
    def start_error(self) -> str:
        """The reason in a service's `start_failed` event. Empty for other lines."""
        return str(self.fields.get("error", "")) if self.event == START_FAILED else ""

    @property
    def is_problem(self) -> bool:
        """A warning or worse, or a line that did not come from the logger, such as a traceback."""
        return self.fields.get("level") not in ("debug", "info")


Observe = Callable[[LogLine], None]
"""Called with each log line. Lines of a child come from the child's reader thread, the launcher's from its threads."""


def ignore(_: LogLine) -> None:
    """An `Observe` that does nothing."""


def parse_line(child: str, text: str) -> LogLine:
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    return LogLine(child, text, fields if isinstance(fields, dict) else {})


def service_exited(name: str, pid: int, how: str, restart_in: float | None) -> LogLine:
    """`restart_in`: seconds until the restart; None if the service has failed permanently."""
    next_step: dict[str, Any] = {"given_up": True} if restart_in is None else {"restart_in": restart_in}
    level = "error" if restart_in is None else "warning"
    return launcher_line(name, "service_exited", level, pid=pid, how=how, **next_step)


def lines_lost(lines: int) -> str:
    return launcher_line(LAUNCHER, "log_lines_lost", "warning", lines=lines).text


def launcher_line(name: str, event: str, level: str, **fields: Any) -> LogLine:
    """A line of the launcher. `name`: the service that the line is about, or LAUNCHER."""
    time = datetime.now(UTC).isoformat()
    line = {"service": LAUNCHER, "id": name, **fields, "event": event, "level": level, "timestamp": time}
    return LogLine(name, json.dumps(line), line)
