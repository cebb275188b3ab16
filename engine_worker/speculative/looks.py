"""How often to look for drafts: looking takes time, too, in every step and for each of its sequences."""

RATE = 0.125
"""Weight of the latest look in averages."""
MARGIN = 2.0
"""What looks must bring by the time they take: more than 1, because they also displace what a step has in the caches of
the processor."""
REST = 8
"""Steps per look while looks bring less."""
HOPE = 1.0
"""Tokens that a look brings before any has."""


class Looks:
    """Bring tokens and take time, on average over the latest looks. Where they do not pay, most steps have none."""

    def __init__(self) -> None:
        self._gained = HOPE
        self._spent = 0.0
        """In tokens that steps without drafts give in the same time."""
        self._looked = False
        """Whether there was a look since the last record."""
        self._seconds = 0.0
        """It took."""
        self._rests = 0
        """Steps before the next look."""

    @property
    def due(self) -> bool:
        return not self._rests

    def skip(self) -> None:
        self._rests -= 1

    def add(self, seconds: float) -> None:
        """A look took so long."""
        self._looked, self._seconds = True, seconds

    def record(self, gained: float, tokens_per_second: float) -> None:
        """What drafts of a step, if it had any, gained in tokens, and how fast steps are without them."""
        if self._looked:
            self._looked = False
            self._gained += RATE * (gained - self._gained)
            self._spent += RATE * (self._seconds * tokens_per_second - self._spent)
            self._rests = REST - 1 if self._gained < MARGIN * self._spent else 0
