"""How long the whole may take."""

import time
from collections.abc import Callable


class Budget:
    """Counts from when it is made."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._began = clock()

    @property
    def spent(self) -> float:
        """Seconds."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds, below zero where it is overdrawn."""
        return self.seconds - self.spent
