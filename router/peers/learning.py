"""Adapters that a router which has just started does not know yet: the ring may know them, or they are configured."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from structlog.stdlib import BoundLogger

from router.errors import RequestError, shown
from sluice.ring.errors import ErrorCode

LEARN_SECONDS = 5.0
"""From the first heartbeat of an engine on, or the latest one that did not have room for all that its engine knows: so
long unknown ids may still be reported. A request waits as long for that first heartbeat, or for an adapter that is
configured."""
RETRY_SECONDS = 1.0
"""Until a configured adapter is loaded once more whose engines have died."""
MAX_WAITING = 1024
"""Requests: they are not admitted yet, and each holds its prompt."""


class Learning:
    """Of one kind of adapter."""

    def __init__(
        self, configured: Mapping[str, str], log: BoundLogger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`configured`: paths by id, to be loaded from the start on."""
        self._configured = dict(configured)
        self._log = log
        self._clock = clock
        self._pending = set(configured)
        """Ids that are configured and have not been tried."""
        self._ends_at: float | None = None
        """None: no engine has said anything yet."""
        self._changed = asyncio.Event()
        """Set for a moment at each change."""
        self._waiting = 0

    def on_heartbeat(self, *, more: bool = False) -> None:
        """`more`: it had as many changes as one may have, so others follow."""
        now = self._clock()
        if self._ends_at is None or (more and now < self._ends_at):
            self._ends_at = now + LEARN_SECONDS
            self.on_change()

    def on_change(self) -> None:
        """Wakes those that wait now."""
        self._changed.set()
        self._changed.clear()

    async def load_configured(
        self, is_known: Callable[[str], bool], load: Callable[[str, str], Awaitable[Any]]
    ) -> None:
        """Those that are not known: the ring may know newer changes. `load`: (id, path), raises RequestError."""
        for adapter_id, path in self._configured.items():
            while not is_known(adapter_id):
                try:
                    await load(adapter_id, path)
                except RequestError as error:
                    self._log.error("adapter_not_loaded", adapter=adapter_id, path=path, reason=error.message)
                    if error.code not in (ErrorCode.NO_ENGINE, ErrorCode.ENGINE_LOST):
                        break
                    await asyncio.sleep(RETRY_SECONDS)
            self._pending.discard(adapter_id)
            self.on_change()

    async def wait(self, adapter_id: str, is_known: Callable[[], bool]) -> None:
        """Until the id is known, or it is clear that the ring does not know it either. `on_change` must be called
        whenever `is_known` may have changed.

        Raises RequestError: NO_ENGINE if it does not become clear, OVERLOADED.
        """
        if is_known():
            return
        if self._waiting >= MAX_WAITING:
            raise RequestError(ErrorCode.OVERLOADED, f"{MAX_WAITING} requests wait for their adapters: try again later")
        self._waiting += 1
        try:
            await self._wait(adapter_id, is_known)
        finally:
            self._waiting -= 1

    async def _wait(self, adapter_id: str, is_known: Callable[[], bool]) -> None:
        patience = self._clock() + LEARN_SECONDS
        while not is_known():
            # None: it takes an event, not time, to make it clear.
            clear_at = None if adapter_id in self._pending else self._ends_at
            left = (patience if clear_at is None else clear_at) - self._clock()
            if left <= 0 and clear_at is None:
                message = f"no engine has reported the adapter {shown(adapter_id)} yet"
                raise RequestError(ErrorCode.NO_ENGINE, message, private=True)
            if left <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()
