"""Whether a router reports ready, also for a while after its last engine or detokenizer was lost."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Readiness:
    """Once ready, a router stays ready for `grace` seconds without an engine or a detokenizer.

    Its requests wait for `peer_wait` then. Otherwise the restart of a lone engine would take every router out of
    service at once, and their clients would find no server.
    """

    _grace: float
    _clock: Callable[[], float] = time.monotonic
    _until: float = -math.inf

    @property
    def ready(self) -> bool:
        """May be read by other threads."""
        return self._clock() < self._until

    def update(self, complete: bool) -> float | None:
        """`complete`: an engine and a detokenizer take work. Returns the length of a grace period that begins now."""
        if complete:
            self._until = math.inf
        elif self._until == math.inf:
            self._until = self._clock() + self._grace
            return self._grace
        return None
