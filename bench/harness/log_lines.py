"""Log lines of a ring's services, as its `observe`."""

import asyncio
import time
from typing import Any

from sluice.launch import LogLine

REQUEST, GIVEN_UP = "request", "attempt given up"
"""Events of a router: a request has ended; an attempt was ended before its request."""
POLL_SECONDS = 0.05
TIMEOUT_SECONDS = 30.0


class RequestLines:
    """What routers log of requests. Called from the threads that read the logs."""

    def __init__(self) -> None:
        self._lines: list[dict[str, Any]] = []

    def __call__(self, line: LogLine) -> None:
        if line.event in (REQUEST, GIVEN_UP):
            self._lines.append(line.fields)

    def of(self, event: str, name: str) -> list[dict[str, Any]]:
        return [line for line in self._lines if line["event"] == event and line["request_id"].startswith(f"{name}-")]

    async def until(self, event: str, name: str, count: int) -> list[dict[str, Any]]:
        """As soon as there are `count` of them. Raises TimeoutError."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(found := self.of(event, name)) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} of {count} lines: {event}, {name}")
            await asyncio.sleep(POLL_SECONDS)
        return found
