"""What routers say of requests in their log, as a ring's `observe`."""

import asyncio
import time
from typing import Any

from sluice.launch import LogLine

LOOK_SECONDS = 0.05
PATIENCE_SECONDS = 30.0


class Lines:
    """Log lines by event. Called from the threads that read them."""

    def __init__(self) -> None:
        self._lines: list[dict[str, Any]] = []

    def __call__(self, line: LogLine) -> None:
        """One more."""
        if line.event in ("request", "attempt given up"):
            self._lines.append(line.fields)

    def of(self, event: str, name: str) -> list[dict[str, Any]]:
        """Those of requests whose id begins so."""
        return [line for line in self._lines if line["event"] == event and line["request_id"].startswith(f"{name}-")]

    async def of_requests(self, name: str, count: int) -> list[dict[str, Any]]:
        """The last line of each of so many requests. Raises TimeoutError where there are not as many."""
        return await self.until("request", name, count)

    async def until(self, event: str, name: str, count: int) -> list[dict[str, Any]]:
        """As soon as there are so many. Raises TimeoutError."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(found := self.of(event, name)) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} lines of {count}: {event}, {name}")
            await asyncio.sleep(LOOK_SECONDS)
        return found
