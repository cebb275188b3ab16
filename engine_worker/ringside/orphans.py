"""Ends requests whose router has restarted or fallen silent."""

import time
from collections.abc import Callable

from structlog.stdlib import BoundLogger

from engine_worker.core.engine import Engine
from engine_worker.ringside.heartbeats import RouterTable
from engine_worker.ringside.mailbox import Mailbox
from sluice.wire.errors import ErrorCode, Fault
from sluice.wire.requests import Submit

CHECK_SECONDS = 1.0
"""Interval between searches for silent routers."""


class Orphans:
    """Finds and ends requests without a router. To be used in the engine's thread."""

    def __init__(self, engine: Engine, mailbox: Mailbox, routers: RouterTable, log: BoundLogger) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._routers = routers
        self._log = log
        self._check_at = time.monotonic() + CHECK_SECONDS

    def end(self) -> None:
        """End the requests whose router was replaced or, checked every CHECK_SECONDS, has fallen silent."""
        if orphans := self._mailbox.take_orphans():
            self._end_where("restarted", lambda submit: (submit.request, submit.attempt) in orphans)
        now = time.monotonic()
        if now < self._check_at:
            return
        self._check_at = now + CHECK_SECONDS
        routers = self._routers.live()
        self._end_where("silent", lambda submit: submit.router not in routers)

    def _end_where(self, why: str, orphaned: Callable[[Submit], bool]) -> None:
        # End with an error, not an abort: if the router is alive after all, it retries the request elsewhere.
        fault = Fault(ErrorCode.ROWS_LOST.name, f"the engine considered the router {why}")
        if ended := self._engine.end_where(orphaned, fault):
            self._log.warning(f"router_{why}", requests=ended)
