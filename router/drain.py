"""Draining: no new requests, and those that live get some time to end."""

import asyncio
from collections.abc import Callable

from router.dispatch import Dispatcher
from router.requests import Requests

ABORT_SECONDS = 2.0
"""Aborted requests get this long to tell their clients."""


class Drain:
    """Once begun it is for good."""

    def __init__(self, requests: Requests, dispatcher: Dispatcher, on_begin: Callable[[], None]) -> None:
        self._requests = requests
        self._dispatcher = dispatcher
        self._on_begin = on_begin

    @property
    def begun(self) -> bool:
        """No new requests are taken."""
        return self._requests.closed

    async def run(self, seconds: float) -> int:
        """Wait until all requests have ended, abort the rest after so many seconds, and return how many those were."""
        self._requests.closed = True
        self._on_begin()
        if await self.idle_within(seconds):
            return 0
        late = self._requests.open
        for live in late:
            self._dispatcher.abort(live)
        await self.idle_within(ABORT_SECONDS)
        return len(late)

    async def idle_within(self, seconds: float) -> bool:
        """Whether all requests have ended in this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._requests.idle.wait()
        except TimeoutError:
            return False
        return True
