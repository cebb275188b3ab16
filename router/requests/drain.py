"""Draining: no new requests, those that live get some time to end, and what is left then is handed back."""

import asyncio
from collections.abc import Callable

from router.errors import RequestError
from router.requests.dispatcher import Dispatcher
from router.requests.registry import Requests
from sluice.ring.errors import ErrorCode

HAND_BACK_SECONDS = 2.0
"""Requests that are handed back get this long to tell their clients."""


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
        """Wait until all requests have ended; after so many seconds hand the rest back: how many those were.

        Their clients get DRAINING after all that has come, and resume at another router.
        """
        self._requests.closed = True
        self._on_begin()
        if await self.idle_within(seconds):
            return 0
        late = self._requests.open
        for live in late:
            self._dispatcher.hand_back(live, RequestError(ErrorCode.DRAINING, "the router is draining"))
        await self.idle_within(HAND_BACK_SECONDS)
        return len(late)

    async def idle_within(self, seconds: float) -> bool:
        """Whether all requests have ended in this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._requests.idle.wait()
        except TimeoutError:
            return False
        return True
