"""When a failed request is retried, and when it is given up."""

import random
import threading

from sluice.client.errors import AlreadyExists, Cancelled, LostEvents, Overloaded, SluiceError, Unavailable

SHORTEST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
# The server has retried already, and the request itself may kill engines: each other router gets one attempt.
SERVER_GAVE_UP = frozenset({"ENGINE_LOST", "DETOKENIZER_LOST", "ROWS_LOST"})
# Reasons given when a router shuts down; empty: a broken connection.
ROUTER_GONE = frozenset({"", "DRAINING"})


def is_router_failure(error: SluiceError) -> bool:
    """Whether another router may succeed at once."""
    # Cancelled here means by gRPC or on the way: calls that this client cancels never get here.
    return isinstance(error, (Unavailable, LostEvents, Cancelled))


class Retries:
    """The attempts of one request. Times are seconds of one clock, which is passed in."""

    def __init__(
        self,
        addresses: int,
        timeout: float | None,
        retry_timeout: float,
        resume_timeout: float,
        now: float,
        answered: threading.Event | None = None,
    ) -> None:
        """`addresses` counts the routers. `answered`: set once any router has answered this client."""
        self.engine_deaths = 0
        """Consecutive engine deaths under this request, as routers reported."""
        self._answered = answered or threading.Event()
        self._addresses = addresses
        self._begin = now
        self._end = None if timeout is None else now + timeout
        self._retry_timeout = retry_timeout
        self._resume_timeout = resume_timeout
        self._begun = False
        self._failures = 0
        self._broken_at: float | None = None

    def on_admitted(self) -> None:
        """A router accepted the request: `resume_timeout` applies from now on."""
        self._begun = True
        self._answered.set()

    def on_progress(self) -> None:
        """New tokens arrived: the next failure begins a new count."""
        self._failures, self._broken_at, self.engine_deaths = 0, None, 0

    def elapsed(self, now: float) -> float:
        return now - self._begin

    def time_left(self, now: float) -> float | None:
        """Seconds until the request's timeout; None: no timeout."""
        return None if self._end is None else max(self._end - now, 0.0)

    def on_failure(self, error: SluiceError, now: float) -> float:
        """Seconds to wait before the next attempt. Raises `error` if it is final."""
        self._failures += 1
        if error.reason:
            self._answered.set()
        self.engine_deaths = error.engine_deaths or self.engine_deaths
        if self._broken_at is None:
            self._broken_at = now
        if not self._is_retryable(error):
            raise error
        # Each address is tried once before the first wait.
        if is_router_failure(error) and self._failures < self._addresses:
            return 0.0
        pause = self._pause(error)
        patience = self._resume_timeout if self._begun or self._is_restarting(error) else self._retry_timeout
        if error.reason in SERVER_GAVE_UP or now + pause > self._broken_at + patience:
            raise error
        left = self.time_left(now)
        return pause if left is None else min(pause, left)

    def _is_retryable(self, error: SluiceError) -> bool:
        busy = isinstance(error, Overloaded) and error.retry_after is not None
        if not self._begun:
            return busy or is_router_failure(error)
        # A router that has not noticed the end of our last attempt still holds its request id.
        ours = isinstance(error, AlreadyExists)
        return self._resume_timeout > 0 and (busy or ours or is_router_failure(error))

    def _is_restarting(self, error: SluiceError) -> bool:
        # If routers answered before and none does now, they are probably being restarted: worth a wait.
        return self._answered.is_set() and is_router_failure(error) and error.reason in ROUTER_GONE

    def _pause(self, error: SluiceError) -> float:
        rounds = min(max(self._failures - self._addresses, 0), 10)
        pause = error.retry_after or min(SHORTEST_PAUSE_SECONDS * (1 << rounds), LONGEST_PAUSE_SECONDS)
        # Random, so that clients that failed together do not return together.
        return pause * random.uniform(1.0, 1.5)
