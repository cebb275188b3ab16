"""Whether a router reports ready. It does so for a while even after its last engine or detokenizer was lost."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Readiness:
    """Once ready, a router stays ready for `grace` seconds without an engine or a detokenizer.

    Requests wait for up to `peer_wait` in the meantime. Without the grace period, the restart of a lone engine would
    take all routers out of service, and clients would find no server.
    """

    _grace: float
    _clock: Callable[[], float] = time.monotonic
    _until: float = -math.inf

    @property
    def ready(self) -> bool:
        """May be read from any thread."""
        return self._clock() < self._until

    def update(self, complete: bool) -> float | None:
        """`complete`: whether an engine and a detokenizer accept work. Returns the length of a grace period if one
        begins now."""
        if complete:
            self._until = math.inf
        elif self._until == math.inf:
            self._until = self._clock() + self._grace
            return self._grace
        return None
