"""What engines say of their steps and requests, by way of their log."""

import os
from typing import Any

from sluice.launch import LogLine

CALLBACK = f"{__name__}:tell"
"""As an engine's stats_callback."""
STDOUT = 1


def tell(text: str) -> None:
    """Into the log, in one write: other threads write there too."""
    os.write(STDOUT, f"{text}\n".encode())


class Heard:
    """As a ring's `observe`: called from the threads that read the logs."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, line: LogLine) -> None:
        """One more."""
        if line.fields.get("type") in ("step", "request"):
            self._lines.append((line.child, line.fields))

    def forget(self) -> None:
        """Whatever was said until now."""
        self._lines = []

    def of(self, service: str, kind: str) -> list[dict[str, Any]]:
        """Steps or requests of one engine, as docs/metrics.md has them."""
        return [fields for child, fields in self._lines if child == service and fields["type"] == kind]
