"""Duration and learning rate of a training run: warm-up, plateau, linear decay."""

import time

_WARMUP_STEPS = 100
_DECAY_SHARE = 0.2


class Schedule:
    """Ends after a number of steps, or by the clock.

    By the clock, the total number of steps is fixed when the plateau's share of the time is over. It depends on the
    machine, but a run with `steps` set to that total is the same.
    """

    def __init__(self, minutes: float, steps: int | None) -> None:
        self.total = steps
        self._plateau_ends = time.monotonic() + 60 * minutes * (1 - _DECAY_SHARE)

    def observe(self, step: int) -> None:
        """To be called after each step, with the number of steps so far."""
        if self.total is None and step > _WARMUP_STEPS and time.monotonic() >= self._plateau_ends:
            self.total = round(step / (1 - _DECAY_SHARE))

    def decaying(self, step: int) -> bool:
        return self.total is not None and step >= self.total * (1 - _DECAY_SHARE)

    def done(self, step: int) -> bool:
        return self.total is not None and step >= self.total

    def rate(self, step: int) -> float:
        """Fraction of the peak learning rate, in (0, 1]."""
        rate = min(1.0, (step + 1) / _WARMUP_STEPS)
        if self.total is not None and self.decaying(step):
            rate = min(rate, (self.total - step) / (self.total * _DECAY_SHARE))
        return rate
