"""Draining: no new requests, some time for the open ones to end, then the rest is handed back to its clients."""

import asyncio
from collections.abc import Callable

from router.errors import RequestError
from router.requests.dispatcher import Dispatcher
from router.requests.registry import Requests
from sluice.ring.errors import ErrorCode

HAND_BACK_SECONDS = 2.0
"""For the answers of requests that are handed back to reach their clients."""


class Drain:
    """Irreversible."""

    def __init__(self, requests: Requests, dispatcher: Dispatcher, on_begin: Callable[[], None]) -> None:
        self._requests = requests
        self._dispatcher = dispatcher
        self._on_begin = on_begin

    @property
    def begun(self) -> bool:
        return self._requests.closed

    async def run(self, seconds: float) -> int:
        """Wait until all requests have ended, and hand back those that are open after `seconds`; returns their number.

        Their clients get DRAINING after all that has come, and resume at another router.
        """
        self._requests.close()
        # Health says NOT_SERVING before anything ends, so that load balancers send new calls elsewhere.
        self._on_begin()
        if await self.wait_idle(seconds):
            return 0
        late = self._requests.open
        for request in late:
            self._dispatcher.hand_back(request, RequestError(ErrorCode.DRAINING, "the router is draining"))
        await self.wait_idle(HAND_BACK_SECONDS)
        return len(late)

    async def wait_idle(self, seconds: float) -> bool:
        """Whether all requests have ended within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._requests.idle.wait()
        except TimeoutError:
            return False
        return True
