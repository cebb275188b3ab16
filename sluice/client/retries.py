"""When a failed request is retried, and after what delay."""

import random
import threading

from sluice.client.errors import (
    AlreadyExists,
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    LostEvents,
    Overloaded,
    SluiceError,
    Unavailable,
    Unreachable,
    with_timeout,
)

SHORTEST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
LONG_WAIT_SECONDS = 2.0
"""From when on a wait for a router is reported."""
SERVER_GAVE_UP = frozenset({"ENGINE_LOST", "DETOKENIZER_LOST", "ROWS_LOST"})
"""Reasons after which each other router gets only one attempt: the server has already retried the request, which may
itself kill engines."""
ROUTER_GONE = frozenset({"", "DRAINING"})
"""Reasons of a router that shuts down; "" is a broken connection."""


def is_router_failure(error: SluiceError) -> bool:
    """Whether another router may succeed immediately."""
    # Cancelled means by gRPC or a proxy: a call that this client cancels does not get here.
    return isinstance(error, (Unavailable, LostEvents, Cancelled))


def is_broken_connection(error: SluiceError) -> bool:
    """Whether a router existed and may have begun the request."""
    return isinstance(error, (ConnectionLost, LostEvents, Cancelled)) and not error.reason


class Retries:
    """The retry policy of one request. `now` is always in seconds of the same monotonic clock."""

    def __init__(
        self,
        addresses: int,
        timeout: float | None,
        retry_timeout: float,
        resume_timeout: float,
        now: float,
        answered: threading.Event | None = None,
    ) -> None:
        """`addresses`: number of routers. `answered`: set once any router has answered the client, or has
        accepted a connection."""
        self.engine_deaths = 0
        """Consecutive engine deaths that routers have attributed to this request."""
        self._answered = answered or threading.Event()
        self._addresses = addresses
        self._start = now
        self._timeout = timeout
        self._end = None if timeout is None else now + timeout
        self._retry_timeout = retry_timeout
        self._resume_timeout = resume_timeout
        self._admitted = False
        self._sent = False
        """Whether a router may have begun an earlier attempt, whose connection broke."""
        self._failures = 0
        self._broken_at: float | None = None
        self._reported = False
        """Whether the present wait was reported."""
        self._cause: SluiceError | None = None
        """The latest failure after which the call waited, since the last progress."""

    def on_admitted(self) -> None:
        """A router accepted the request, so `resume_timeout` applies from now on."""
        self._admitted = True
        self._answered.set()

    def on_progress(self) -> None:
        """New tokens were received, so the next failure counts as the first."""
        self._failures, self._broken_at, self._cause = 0, None, None
        self.engine_deaths, self._reported = 0, False

    def elapsed(self, now: float) -> float:
        """Seconds since the start of the request."""
        return now - self._start

    @property
    def timeout(self) -> float | None:
        """The request's timeout in seconds; None: no timeout."""
        return self._timeout

    def time_left(self, now: float) -> float | None:
        """Seconds until the request's timeout; None: no timeout."""
        return None if self._end is None else max(self._end - now, 0.0)

    def on_failure(self, error: SluiceError, now: float) -> float:
        """Return the seconds to wait before the next attempt. Raises `error` if it is final."""
        self._failures += 1
        is_broken = is_broken_connection(error)
        if error.reason or is_broken:
            self._answered.set()
        self._sent = self._sent or is_broken
        self.engine_deaths = error.engine_deaths or self.engine_deaths
        if self._broken_at is None:
            self._broken_at = now
        if not self._is_retryable(error):
            raise self._explained(error)
        # Each address is tried once before the first wait.
        if is_router_failure(error) and self._failures < self._addresses:
            return 0.0
        pause = self._pause(error)
        if error.reason in SERVER_GAVE_UP or now + pause > self._broken_at + self._limit(error):
            raise self._final(error, now - self._broken_at)
        self._cause = error
        left = self.time_left(now)
        return pause if left is None else min(pause, left)

    def long_wait(self, error: SluiceError, until: float) -> float | None:
        """How many seconds the wait for a router may take in all, once for each wait that has become long.

        `error`: the latest failure. `until`: when the next attempt begins. None: there is nothing to report.
        """
        began = self._broken_at
        if self._reported or began is None or not self._is_restarting(error) or until < began + LONG_WAIT_SECONDS:
            return None
        self._reported = True
        limit = self._limit(error)
        return limit if self._end is None else min(limit, self._end - began)

    def _final(self, error: SluiceError, waited: float) -> SluiceError:
        if not isinstance(error, Unreachable) or not self._is_restarting(error) or self._failures <= self._addresses:
            return error
        # gRPC's message says only why the last attempt failed, as if there had never been a connection.
        return ConnectionLost(f"the connection was lost, and no router has answered for {waited:.0f} s ({error.cause})")

    def _explained(self, error: SluiceError) -> SluiceError:
        """An expired timeout with its seconds, and with the cause of earlier attempts; other errors as they are."""
        error = with_timeout(error, self._timeout)
        if not isinstance(error, DeadlineExceeded) or self._cause is None:
            return error
        return DeadlineExceeded(f"{error.message}; the call was retried because of: {self._cause.message}")

    def _is_retryable(self, error: SluiceError) -> bool:
        busy = isinstance(error, Overloaded) and error.retry_after is not None
        # The request id is in use at a router that has not noticed the end of our last attempt.
        is_own_id = isinstance(error, AlreadyExists) and self._resume_timeout > 0 and (self._admitted or self._sent)
        can_retry = self._resume_timeout > 0 or not self._admitted
        return is_own_id or (can_retry and (busy or is_router_failure(error)))

    def _limit(self, error: SluiceError) -> float:
        """Seconds after the first failure at which to give up."""
        if self._admitted:
            return self._resume_timeout
        if self._sent or self._is_restarting(error):
            return max(self._resume_timeout, self._retry_timeout)
        return self._retry_timeout

    def _is_restarting(self, error: SluiceError) -> bool:
        # Routers that answered before and do not answer now are probably restarting, which is worth waiting for.
        return self._answered.is_set() and is_router_failure(error) and error.reason in ROUTER_GONE

    def _pause(self, error: SluiceError) -> float:
        rounds = min(max(self._failures - self._addresses, 0), 10)
        pause = error.retry_after or min(SHORTEST_PAUSE_SECONDS * (1 << rounds), LONGEST_PAUSE_SECONDS)
        # Random, so that clients that failed together do not retry together.
        return pause * random.uniform(1.0, 1.5)
