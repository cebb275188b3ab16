"""How often to search for drafts: a search takes time, too, in every step and for each of its sequences."""

RATE = 0.125
"""Weight of the latest search in averages."""
MARGIN = 2.0
"""What searches must bring by the time they take: more than 1, because they also displace what a step has in the
caches of the processor."""
INTERVAL = 8
"""Steps per search while searches bring less."""
EXPECTED = 1.0
"""Tokens that a search is assumed to bring before the first one."""


class Searches:
    """They bring tokens and take time, on average over the latest ones. Where they do not pay, most steps have none."""

    def __init__(self) -> None:
        self._gained = EXPECTED
        self._spent = 0.0
        """In tokens that steps without drafts give in the same time."""
        self._searched = False
        """Whether there was a search since the last record."""
        self._seconds = 0.0
        """That it took."""
        self._pause = 0
        """Steps before the next search."""

    @property
    def due(self) -> bool:
        return not self._pause

    def skip(self) -> None:
        self._pause -= 1

    def add(self, seconds: float) -> None:
        """A search took so long."""
        self._searched, self._seconds = True, seconds

    def record(self, gained: float, tokens_per_second: float) -> None:
        """What drafts of a step, if it had any, gained in tokens, and how fast steps are without them."""
        if self._searched:
            self._searched = False
            self._gained += RATE * (gained - self._gained)
            self._spent += RATE * (self._seconds * tokens_per_second - self._spent)
            self._pause = INTERVAL - 1 if self._gained < MARGIN * self._spent else 0
