"""Decides how often to search for drafts. A search takes time in a step, for each of its sequences."""

RATE = 0.125
"""Weight of the latest search in averages."""
MARGIN = 2.0
"""Least ratio of the tokens that searches gain to the tokens that their time costs. More than 1, because they also
evict a step's data from the processor's caches."""
INTERVAL = 8
"""Steps per search while searches do not pay."""
EXPECTED = 1.0
"""Tokens that a search is assumed to gain before the first one."""


class LookupSchedule:
    """Averages the gain and the time of the latest searches. While they do not pay, most steps skip the search."""

    def __init__(self) -> None:
        self._gained = EXPECTED
        self._spent = 0.0
        """Time of a search, in tokens that steps without drafts generate in that time."""
        self._searched = False
        """Whether there was a search since the last `record`."""
        self._seconds = 0.0
        """Duration of that search."""
        self._pause = 0
        """Steps to skip before the next search."""

    @property
    def due(self) -> bool:
        return not self._pause

    def skip(self) -> None:
        self._pause -= 1

    def add(self, seconds: float) -> None:
        """Record the duration of a search."""
        self._searched, self._seconds = True, seconds

    def record(self, gained: float, tokens_per_second: float) -> None:
        """Record a step. `gained`: tokens that its drafts have gained; 0 if it had none. `tokens_per_second`: speed of
        steps without drafts."""
        if self._searched:
            self._searched = False
            self._gained += RATE * (gained - self._gained)
            self._spent += RATE * (self._seconds * tokens_per_second - self._spent)
            self._pause = INTERVAL - 1 if self._gained < MARGIN * self._spent else 0
