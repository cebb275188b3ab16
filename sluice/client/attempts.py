"""When a failed request is tried again, and when it is given up."""

import random
import threading

from sluice.client.errors import AlreadyExists, Cancelled, LostEvents, Overloaded, SluiceError, Unavailable

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
GIVEN_UP = frozenset({"ENGINE_LOST", "DETOKENIZER_LOST", "ROWS_LOST"})
"""Reasons after which the server has tried again by itself, often enough: other routers are asked, each once. The
request itself may be what ends engines."""
AWAY = frozenset({"", "DRAINING"})
"""Reasons of routers that end, and of connections that break."""


def tells_of_router(error: SluiceError) -> bool:
    """Whether another router may do better at once. A call that this client did not cancel was cancelled by gRPC itself
    or on its way; what the client did cancel does not get here."""
    return isinstance(error, (Unavailable, LostEvents, Cancelled))


class Attempts:
    """The attempts of one request on so many addresses. Times are seconds of one clock; it is passed in."""

    def __init__(
        self,
        addresses: int,
        timeout: float | None,
        retry_timeout: float,
        resume_timeout: float,
        now: float,
        answered: threading.Event | None = None,
    ) -> None:
        """`answered` is set once any router has answered the client: where none does now, one is being restarted."""
        self.engine_deaths = 0
        """Under this request in a row, as the routers before said."""
        self._answered = answered or threading.Event()
        self._addresses = addresses
        self._begin = now
        self._end = None if timeout is None else now + timeout
        self._retry_timeout = retry_timeout
        self._resume_timeout = resume_timeout
        self._begun = False
        self._failures = 0
        self._broken_at: float | None = None

    def admitted(self) -> None:
        """A router has taken the request: from now on it is one that has begun."""
        self._begun = True
        self._answered.set()

    def advanced(self) -> None:
        """Something new has come: whatever fails next is a new failure."""
        self._failures, self._broken_at, self.engine_deaths = 0, None, 0

    def elapsed(self, now: float) -> float:
        """Seconds since the first attempt began."""
        return now - self._begin

    def left(self, now: float) -> float | None:
        """Seconds that the request still has; None: no limit."""
        return None if self._end is None else max(self._end - now, 0.0)

    def failed(self, error: SluiceError, now: float) -> float:
        """Seconds to wait before the next attempt. Raises the error where there is none."""
        self._failures += 1
        if error.reason:
            self._answered.set()
        self.engine_deaths = error.engine_deaths or self.engine_deaths
        if self._broken_at is None:
            self._broken_at = now
        if not self._may_go_on(error):
            raise error
        if tells_of_router(error) and self._failures < self._addresses:
            return 0.0
        pause = self._pause(error)
        patience = self._resume_timeout if self._begun or self._comes_back(error) else self._retry_timeout
        if error.reason in GIVEN_UP or now + pause > self._broken_at + patience:
            raise error
        left = self.left(now)
        return pause if left is None else min(pause, left)

    def _may_go_on(self, error: SluiceError) -> bool:
        busy = isinstance(error, Overloaded) and error.retry_after is not None
        if not self._begun:
            return busy or tells_of_router(error)
        # A router that has not noticed yet how an attempt ended still has its id.
        ours = isinstance(error, AlreadyExists)
        return self._resume_timeout > 0 and (busy or ours or tells_of_router(error))

    def _comes_back(self, error: SluiceError) -> bool:
        """Whether the router has been there and will be again."""
        return self._answered.is_set() and tells_of_router(error) and error.reason in AWAY

    def _pause(self, error: SluiceError) -> float:
        """What the server says, or longer with each round over all addresses; no two clients take the same."""
        rounds = min(max(self._failures - self._addresses, 0), 10)
        pause = error.retry_after or min(FIRST_PAUSE_SECONDS * (1 << rounds), LONGEST_PAUSE_SECONDS)
        return pause * random.uniform(1.0, 1.5)
