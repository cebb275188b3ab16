"""How long to train, and at what learning rate: warm-up, plateau, linear decay."""

import time

_WARMUP_STEPS = 100
_DECAY_SHARE = 0.2


class Schedule:
    """Ends at a number of steps, or by the clock.

    By the clock, the total is fixed when the plateau's share of the time is used up. It depends on the machine, the
    shape of the curve does not: training again with `steps` set to that total repeats the same run.
    """

    def __init__(self, minutes: float, steps: int | None) -> None:
        self.total = steps
        self._plateau_ends = time.monotonic() + 60 * minutes * (1 - _DECAY_SHARE)

    def observe(self, step: int) -> None:
        """Call before each step."""
        if self.total is None and step > _WARMUP_STEPS and time.monotonic() >= self._plateau_ends:
            self.total = round(step / (1 - _DECAY_SHARE))

    def decaying(self, step: int) -> bool:
        return self.total is not None and step >= self.total * (1 - _DECAY_SHARE)

    def done(self, step: int) -> bool:
        return self.total is not None and step >= self.total

    def rate(self, step: int) -> float:
        """Factor on the peak learning rate, in (0, 1]."""
        rate = min(1.0, (step + 1) / _WARMUP_STEPS)
        if self.total is not None and self.decaying(step):
            rate = min(rate, (self.total - step) / (self.total * _DECAY_SHARE))
        return rate
