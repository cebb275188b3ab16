"""Log lines of a ring: those that the services write, and the launcher's own about them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

LAUNCHER = "launcher"
SERVICE_RECOVERED = "service_recovered"


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a service, or of the launcher."""

    child: str
    """Such as "engine-0"."""
    text: str
    fields: dict[str, Any] = field(default_factory=dict)
    """The JSON object of structlog; empty for a line that did not come from the logger."""

    @property
    def event(self) -> str:
        """Empty for a line that did not come from the logger."""
        return str(self.fields.get("event", ""))

    @property
    def is_problem(self) -> bool:
        """A warning or worse, or a line that did not come from the logger, such as a traceback."""
        return self.fields.get("level") not in ("debug", "info")


Observe = Callable[[LogLine], None]
"""Gets each line of each child, from the child's reader thread, and those of the launcher from the launcher's."""


def ignore(_: LogLine) -> None:
    """An `Observe` that shows nothing."""


def parse_line(child: str, text: str) -> LogLine:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return LogLine(child, text, found if isinstance(found, dict) else {})


def service_exited(name: str, pid: int, how: str, restart_in: float | None) -> LogLine:
    """`restart_in` seconds; None: the service is given up."""
    then: dict[str, Any] = {"given_up": True} if restart_in is None else {"restart_in": restart_in}
    return launcher_line(name, "service_exited", "error" if restart_in is None else "warning", pid=pid, how=how, **then)


def lines_lost(lines: int) -> str:
    return launcher_line(LAUNCHER, "log_lines_lost", "warning", lines=lines).text


def launcher_line(name: str, event: str, level: str, **fields: Any) -> LogLine:
    """`name`: of the service that it is about, or LAUNCHER."""
    time = datetime.now(UTC).isoformat()
    found = {"service": LAUNCHER, "id": name, **fields, "event": event, "level": level, "timestamp": time}
    return LogLine(name, json.dumps(found), found)
