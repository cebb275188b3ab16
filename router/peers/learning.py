"""Adapter ids that a newly started router does not know yet: the ring may know them, or they are configured."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from structlog.stdlib import BoundLogger

from router.errors import RequestError, shown
from router.shares import SharedSpace, of_tenant
from sluice.wire.errors import ErrorCode

LEARN_SECONDS = 5.0
"""Time for engines to report their adapters, from the first heartbeat on, or from the latest heartbeat that had no room
for everything. Until then, an unknown id may still be reported. A request also waits this long for the first heartbeat,
or for a configured adapter to be loaded."""
RETRY_SECONDS = 1.0
"""Delay before a configured adapter is loaded again after its engines have died."""
MAX_WAITING = 1024
"""Requests that may wait. They are not admitted yet, and each holds its prompt in memory. Tenants have shares of them.
"""


class Learning:
    """Tracks whether this router has learned all ids of one kind of adapter."""

    def __init__(
        self, configured: Mapping[str, str], log: BoundLogger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`configured`: paths by id of the adapters to load at the start."""
        self._configured = dict(configured)
        self._log = log
        self._clock = clock
        self._pending = set(configured)
        """Configured ids whose load has not been attempted yet."""
        self._ends_at: float | None = None
        """When all ids are expected to have been reported; None before the first heartbeat."""
        self._changed = asyncio.Event()
        """Pulsed at each change: set and cleared immediately."""
        self._waiting = SharedSpace(MAX_WAITING)
        """Waiting requests by tenant."""

    def on_heartbeat(self, *, more: bool = False) -> None:
        """`more`: the heartbeat carried as many changes as it may, so more will follow."""
        now = self._clock()
        if self._ends_at is None or (more and now < self._ends_at):
            self._ends_at = now + LEARN_SECONDS
            self.on_change()

    def on_change(self) -> None:
        """Wake the requests that are waiting now."""
        self._changed.set()
        self._changed.clear()

    async def load_configured(
        self, is_known: Callable[[str], bool], load: Callable[[str, str], Awaitable[Any]]
    ) -> None:
        """Load the configured adapters, except ids that the ring already knows, since its changes are newer.

        `load` is called with (id, path) and may raise RequestError.
        """
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

    async def wait(self, adapter_id: str, is_known: Callable[[], bool], tenant: str = "") -> None:
        """Wait until the id is known, or until it is certain that the ring does not know it either.

        `on_change` must be called whenever `is_known` may have changed. Raises RequestError NO_ENGINE if it does not
        become certain in time, or OVERLOADED.
        """
        if is_known():
            return
        with self.place(tenant):
            await self._wait(adapter_id, is_known)

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """A place for a request that waits for an adapter. Raises RequestError OVERLOADED."""
        if not self._waiting.has_room(tenant, 1):
            whose = of_tenant(tenant)
            limit = self._waiting.limit_of(tenant)
            message = f"too many requests{whose} are waiting for their adapters, at most {limit} may: try again later"
            raise RequestError(ErrorCode.OVERLOADED, message)
        self._waiting.take(tenant, 1)
        try:
            yield
        finally:
            self._waiting.release(tenant, 1)

    async def _wait(self, adapter_id: str, is_known: Callable[[], bool]) -> None:
        deadline = self._clock() + LEARN_SECONDS
        while not is_known():
            # When it will be certain that the id is unknown. None while that depends on an event: the load of a
            # configured adapter, or the first heartbeat.
            certain_at = None if adapter_id in self._pending else self._ends_at
            seconds = (deadline if certain_at is None else certain_at) - self._clock()
            if seconds <= 0 and certain_at is None:
                message = f"no engine has reported the adapter {shown(adapter_id)} yet"
                raise RequestError(ErrorCode.NO_ENGINE, message, private=True)
            if seconds <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
