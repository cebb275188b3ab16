"""The statistics of one request, for its result."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from sluice.v1 import admin_pb2 as pb

REPORT_SECONDS = 5.0
"""The longest wait for a report: ten times the interval in which engines report. An engine may have died."""


def has_token(stats: pb.RequestStats) -> bool:
    return stats.HasField("first_token")


def has_ended(stats: pb.RequestStats) -> bool:
    return bool(stats.stage == pb.REQUEST_STAGE_ENDED)


class StatsWatch:
    """On the session's event loop."""

    def __init__(self) -> None:
        self._latest: pb.RequestStats | None = None
        self._changed = asyncio.Event()

    def put(self, stats: pb.RequestStats) -> None:
        self._latest = stats
        self._changed.set()

    async def wait(self, reached: Callable[[pb.RequestStats], bool]) -> pb.RequestStats | None:
        """The newest, as soon as they are what is waited for, or at the time limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                while self._latest is None or not reached(self._latest):
                    self._changed.clear()
                    await self._changed.wait()
        return self._latest
