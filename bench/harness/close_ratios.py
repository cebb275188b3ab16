"""Repeats comparisons whose ratio is near or below 1: a few rounds cannot distinguish a small loss from noise."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from bench.harness.load import Load, Run, System
from bench.harness.stats import sustained_rate
from bench.harness.topic import Step, interleave

CLOSE = 1.05
"""Comparisons with a smaller ratio are repeated."""


class Comparison:
    """Compares the speeds of two loads on the same system. Each load is the same in all rounds."""

    def __init__(self, base: tuple[str, Load], other: tuple[str, Load]) -> None:
        """Each load with its name in progress messages."""
        self._sides = (base, other)
        self.base: list[Run] = []
        """Runs by round, over all starts of the system."""
        self.other: list[Run] = []

    def measure(self, system: System, repeats: int, step: Step, start: str = "") -> None:
        """Runs both loads in turns, `repeats` times each."""
        runs = interleave({f"{name}{start}": (system, load) for name, load in self._sides}, repeats, step)
        for known, new in zip((self.base, self.other), runs, strict=True):
            known += new

    @property
    def ratios(self) -> list[float]:
        """Speed of `other` divided by that of `base`, by round."""
        return [sustained_rate(b) / sustained_rate(a) for a, b in zip(self.base, self.other, strict=True)]


def measure_close_again(
    comparisons: Iterable[Comparison],
    start: Callable[[], AbstractContextManager[System]],
    starts: int,
    repeats: int,
    step: Step,
) -> None:
    """Repeats the comparisons whose median ratio so far is below CLOSE: `repeats` more rounds in each of `starts` new
    processes of the system, since processes of the same code differ."""
    close = [each for each in comparisons if statistics.median(each.ratios) < CLOSE]
    for number in range(1, starts + 1) if close else ():
        with start() as system:
            for each in close:
                each.measure(system, repeats, step, f", start {number} of {starts}")


def middle_half(ratios: Sequence[float]) -> tuple[float, float]:
    """The first and third quartile of at least one ratio."""
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 3
    return low, high
