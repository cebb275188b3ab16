"""Ratios near 1, or below, are measured again: a few rounds do not tell a small loss from the noise of a machine."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from bench.harness.load import Load, Run, System
from bench.harness.stats import sustained_rate
from bench.harness.topic import Step, interleave

CLOSE = 1.05
"""Ratios below are."""


class Comparison:
    """Two loads, each the same in all rounds, whose speeds on one system are compared."""

    def __init__(self, base: tuple[str, Load], other: tuple[str, Load]) -> None:
        """Each with the name by which progress is shown."""
        self._sides = (base, other)
        self.base: list[Run] = []
        self.other: list[Run] = []
        """By round, over all starts."""

    def measure(self, system: System, repeats: int, step: Step, start: str = "") -> None:
        """Both in turns."""
        runs = interleave({f"{name}{start}": (system, load) for name, load in self._sides}, repeats, step)
        for known, new in zip((self.base, self.other), runs, strict=True):
            known += new

    @property
    def ratios(self) -> list[float]:
        """Of the other's speed by the base's, by round."""
        return [sustained_rate(b) / sustained_rate(a) for a, b in zip(self.base, self.other, strict=True)]


def measure_close_again(
    comparisons: Iterable[Comparison],
    start: Callable[[], AbstractContextManager[System]],
    starts: int,
    repeats: int,
    step: Step,
) -> None:
    """Which ones are close follows from the rounds so far. Those get `repeats` more in each of so many `starts` of the
    system: processes of the same code differ."""
    close = [each for each in comparisons if statistics.median(each.ratios) < CLOSE]
    for number in range(1, starts + 1) if close else ():
        with start() as system:
            for each in close:
                each.measure(system, repeats, step, f", start {number} of {starts}")


def middle_half(ratios: Sequence[float]) -> tuple[float, float]:
    """The quartiles of at least one ratio."""
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 3
    return low, high
