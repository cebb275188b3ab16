from contextlib import contextmanager

import pytest

from bench.harness.close_ratios import Comparison, measure_close_again, middle_half
from bench.harness.load import Load, PlannedRequest, Run, Trace


class Systems:
    """Records its starts and runs; serves loads with expected tokens `speed` times as fast as other loads."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self.name = "stand-in"
        self.started = 0
        self.runs: list[tuple[int, str]] = []
        """The number of the start and the side of each run."""

    @contextmanager
    def start(self):
        self.started += 1
        yield self

    def run(self, load: Load) -> Run:
        seconds = 1.0 / self.speed if load.requests[0].expected else 1.0
        self.runs.append((self.started, "other" if load.requests[0].expected else "base"))
        return Run(seconds, {}, [Trace(0.0, [seconds], [10], [])])


def comparison() -> Comparison:
    base = Load([PlannedRequest([1], 10)], 1)
    return Comparison(("base", base), ("other", Load([PlannedRequest([1], 10, expected=[2])], 1)))


def compared(systems: Systems, first: float) -> Comparison:
    """A comparison after one round with this ratio."""
    measured = comparison()
    systems.speed = first
    with systems.start() as system:
        measured.measure(system, 1, lambda _: None)
    return measured


@pytest.fixture
def systems():
    return Systems()


def test_ratios_are_those_of_each_round(systems):
    measured = compared(systems, 1.25)
    systems.speed = 0.5
    with systems.start() as system:
        measured.measure(system, 2, lambda _: None)
    assert measured.ratios == pytest.approx([1.25, 0.5, 0.5])


def test_only_close_comparisons_are_repeated_in_every_extra_start(systems):
    far, even, slow = (compared(systems, first) for first in (1.06, 1.04, 0.7))
    systems.started, systems.runs, systems.speed, progress = 0, [], 2.0, []
    measure_close_again([far, even, slow], systems.start, 3, 4, progress.append)
    assert [len(each.ratios) for each in (far, even, slow)] == [1, 13, 13]
    assert even.ratios == pytest.approx([1.04] + [2.0] * 12)
    assert systems.started == 3
    # Per start and comparison, both sides warm up and have four rounds.
    assert [start for start, _ in systems.runs] == [start for start in (1, 2, 3) for _ in range(2 * 2 * 5)]
    assert "base, start 3 of 3, round 4 of 4" in progress


def test_the_sides_alternate_and_each_starts_half_of_the_rounds(systems):
    even = compared(systems, 1.0)
    systems.runs = []
    measure_close_again([even], systems.start, 1, 4, lambda _: None)
    sides = [side for _, side in systems.runs[2:]]
    assert sides == ["base", "other", "other", "base"] * 2


def test_nothing_is_started_if_no_comparison_is_close(systems):
    far = compared(systems, 1.5)
    measure_close_again([far], systems.start, 3, 4, lambda _: None)
    assert systems.started == 1


def test_only_the_first_rounds_decide_which_comparisons_are_close(systems):
    slow = compared(systems, 0.9)
    systems.speed = 3.0
    measure_close_again([slow], systems.start, 2, 2, lambda _: None)
    assert len(slow.ratios) == 5


def test_middle_half():
    assert middle_half([1.0, 5.0, 2.0, 4.0, 3.0]) == (2.0, 4.0)
    assert middle_half([1.5]) == (1.5, 1.5)
