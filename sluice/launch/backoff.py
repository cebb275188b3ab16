"""When a service that ended is started again."""

from dataclasses import dataclass

FIRST_SECONDS = 0.2
LONGEST_SECONDS = 10.0
HEALTHY_SECONDS = 60.0


@dataclass(slots=True)
class Backoff:
    """Each end in a row doubles the wait, until it was healthy for HEALTHY_SECONDS.

    Given up is only what ends `max_failed_starts` times in a row before it is ready: what was ready in between is no
    broken service, but has met something that others can be spared (or a test that kills).
    """

    max_failed_starts: int
    ends: int = 0
    failed_starts: int = 0

    def after(self, ready_seconds: float | None) -> float | None:
        """Seconds to wait after an end; None: give up. `ready_seconds` is how long it was ready, None: never."""
        if ready_seconds is not None:
            self.failed_starts = 0
            if ready_seconds >= HEALTHY_SECONDS:
                self.ends = 0
        else:
            self.failed_starts += 1
        self.ends += 1
        if self.failed_starts >= self.max_failed_starts:
            return None
        # Bounded before it is raised: 2.0 ** 1024 overflows.
        return min(FIRST_SECONDS * 2.0 ** min(self.ends - 1, 10), LONGEST_SECONDS)
