"""Lines that the services log: JSON objects of structlog, or whatever else a process writes."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of one child."""

    child: str
    """Such as "engine-0"."""
    text: str
    """As it was written."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Its JSON; empty where it is none."""

    @property
    def event(self) -> str:
        """What happened; empty for a line that is not of structlog."""
        return str(self.fields.get("event", ""))

    @property
    def is_problem(self) -> bool:
        """A warning or worse, or a line that did not come from the logger, such as a traceback."""
        return self.fields.get("level") not in ("debug", "info")


Observe = Callable[[LogLine], None]
"""Gets each line of each child, from the child's reader thread, and those of the launcher from the launcher's."""


def parse_line(child: str, text: str) -> LogLine:
    """Read one line."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return LogLine(child, text, found if isinstance(found, dict) else {})


def ignore(_: LogLine) -> None:
    """An `Observe` that shows nothing."""
