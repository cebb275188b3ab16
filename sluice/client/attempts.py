"""When a failed request is tried again, and when it is given up."""

import random

from sluice.client.errors import AlreadyExists, Cancelled, LostEvents, Overloaded, SluiceError, Unavailable

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0


def tells_of_router(error: SluiceError) -> bool:
    """Whether another router may do better at once."""
    return isinstance(error, (Unavailable, LostEvents))


class Attempts:
    """The attempts of one request on so many addresses. Times are seconds of one clock; it is passed in."""

    def __init__(
        self, addresses: int, timeout: float | None, retry_timeout: float, resume_timeout: float, now: float
    ) -> None:
        self._addresses = addresses
        self._begin = now
        self._end = None if timeout is None else now + timeout
        self._retry_timeout = retry_timeout
        self._resume_timeout = resume_timeout
        self._begun = False
        self._admitted = False
        self._failures = 0
        self._broken_at: float | None = None

    def admitted(self) -> None:
        """A router has taken this attempt: from now on the request is one that has begun."""
        self._begun = self._admitted = True

    def advanced(self) -> None:
        """Something new has come: whatever fails next is a new failure."""
        self._failures, self._broken_at = 0, None

    def elapsed(self, now: float) -> float:
        """Seconds since the first attempt began."""
        return now - self._begin

    def left(self, now: float) -> float | None:
        """Seconds that the request still has; None: no limit."""
        return None if self._end is None else max(self._end - now, 0.0)

    def failed(self, error: SluiceError, now: float) -> float:
        """Seconds to wait before the next attempt. Raises the error where there is none."""
        patience = self._patience(error)
        self._admitted = False
        self._failures += 1
        if self._broken_at is None:
            self._broken_at = now
        if patience is None:
            raise error
        if tells_of_router(error) and self._failures < self._addresses:
            return 0.0
        pause = self._pause(error)
        if now + pause > self._broken_at + patience:
            raise error
        left = self.left(now)
        return pause if left is None else min(pause, left)

    def _patience(self, error: SluiceError) -> float | None:
        """Seconds from the first of a row of failures in which to try again; None: this one is final."""
        if not self._begun:
            return self._retry_timeout if tells_of_router(error) or isinstance(error, Overloaded) else None
        # Whoever has to do with this client's own doing was sorted out before; a router may still hold an attempt of
        # which it has not noticed the end.
        broken = tells_of_router(error) or isinstance(error, Cancelled)
        refused = not self._admitted and isinstance(error, (Overloaded, AlreadyExists))
        return (self._resume_timeout or None) if broken or refused else None

    def _pause(self, error: SluiceError) -> float:
        """What the server says, or longer with each round over all addresses; no two clients take the same."""
        rounds = min(max(self._failures - self._addresses, 0), 10)
        pause = error.retry_after or min(FIRST_PAUSE_SECONDS * (1 << rounds), LONGEST_PAUSE_SECONDS)
        return pause * random.uniform(1.0, 1.5)
