"""The statistics of one request, which its result waits for."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from sluice.v1 import admin_pb2 as pb

REPORT_SECONDS = 5.0
"""Longest wait for statistics, in case the engine has died: ten times the interval at which engines report."""


def has_token(stats: pb.RequestStats) -> bool:
    """Whether the request has generated a token."""
    return stats.HasField("first_token")


def has_ended(stats: pb.RequestStats) -> bool:
    return bool(stats.stage == pb.REQUEST_STAGE_ENDED)


class StatsWatch:
    """The newest statistics of one request. Used on the session's event loop."""

    def __init__(self) -> None:
        self._latest: pb.RequestStats | None = None
        self._changed = asyncio.Event()

    def put(self, stats: pb.RequestStats) -> None:
        self._latest = stats
        self._changed.set()

    async def wait(self, reached: Callable[[pb.RequestStats], bool]) -> pb.RequestStats | None:
        """Wait until the statistics satisfy `reached`, or for REPORT_SECONDS, and return the newest, if any."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                while self._latest is None or not reached(self._latest):
                    self._changed.clear()
                    await self._changed.wait()
        return self._latest
