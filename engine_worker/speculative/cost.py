"""What drafts cost, learned from how long steps take."""

from dataclasses import dataclass, field
from typing import NamedTuple

RATE = 0.1
"""Weight of the latest step in averages."""
FASTER_RATE = 0.5
"""The same for a step without drafts that took less than the average: what disturbs a step makes it longer."""
FORGETTING = 0.001
"""Weight of what is expected, in each step without drafts: what was found too expensive is tried again."""
LONGEST = 2.0
"""A step that takes so many times longer than expected was held up by something else."""
FIRST = 3
"""Steps without drafts, of each batch size, before any has some."""
REFRESH = 128
"""Steps with drafts, or behind such a step, after which there is one without."""
LEAST = 0.01


class Cost(NamedTuple):
    """In tokens: of what steps without drafts give in the same time."""

    step: float
    """Of having drafts at all."""
    token: float
    """Of each drafted token; more than 0, at most 1."""


@dataclass(slots=True)
class Line:
    """excess = step + token · drafted, as a least-squares fit to the latest steps: averages of `drafted`, its square,
    `excess`, and their product. `excess`: by how much a step took longer, in steps without drafts."""

    drafted: float = 4.0
    square: float = 20.0
    excess: float = 0.25
    product: float = 1.125

    @property
    def token(self) -> float:
        variance = self.square - self.drafted**2
        slope = (self.product - self.drafted * self.excess) / variance if variance > 0.1 else 0.0
        # Neither part of the cost is negative.
        return min(max(slope, 0.0), max(self.excess, 0.0) / self.drafted)

    @property
    def step(self) -> float:
        return max(0.0, self.excess - self.token * self.drafted)

    def at(self, drafted: int) -> float:
        return self.step + self.token * drafted

    def add(self, drafted: int, excess: float) -> None:
        self.move(Line(drafted, drafted**2, excess, drafted * excess), RATE)

    def move(self, to: "Line", rate: float) -> None:
        self.drafted += rate * (to.drafted - self.drafted)
        self.square += rate * (to.square - self.square)
        self.excess += rate * (to.excess - self.excess)
        self.product += rate * (to.product - self.product)


EXPECTED = Line()


@dataclass(slots=True)
class StepTimes:
    """Of one batch size."""

    num_plain_due: int = FIRST
    """Steps without drafts, before others."""
    num_since_plain: int = 0
    plain: float = 0.0
    """Seconds without drafts, on average."""
    line: Line = field(default_factory=Line)
    behind: float = 0.0
    """Excess of the step behind one with drafts if it has none, else 0, on average. A step of another shape than the
    one before takes longer."""

    def cost(self, batch_size: int) -> Cost | None:
        if self.num_plain_due:
            return None
        if not self.plain:
            # On a clock that stands still, as in tests, nothing costs anything.
            return Cost(0.0, LEAST)
        step, token = self.line.step + max(0.0, self.behind), self.line.token
        return Cost(batch_size * step, min(1.0, max(LEAST, batch_size * token)))

    def add_plain(self, seconds: float) -> None:
        if self.plain:
            rate = FASTER_RATE if seconds < self.plain else RATE
            self.plain += rate * (min(seconds, LONGEST * self.plain) - self.plain)
        else:
            self.plain = seconds
        self.line.move(EXPECTED, FORGETTING)
        self.num_plain_due, self.num_since_plain = max(0, self.num_plain_due - 1), 0

    def add_drafted(self, drafted: int, seconds: float) -> None:
        if self.plain:
            self.line.add(drafted, min(seconds / self.plain, LONGEST * (1 + self.line.at(drafted))) - 1)

    def add_behind(self, drafted: int, seconds: float) -> None:
        """Of a step behind one with drafts; may be another one with drafts."""
        excess = 0.0 if drafted or not self.plain else min(seconds / self.plain, LONGEST) - 1
        self.behind += RATE * (excess - self.behind)


class DraftCost:
    """A step without drafts gives one token per sequence. So in a batch of b sequences, what makes steps longer by a
    part x of one costs b·x tokens."""

    def __init__(self) -> None:
        self._times: dict[int, StepTimes] = {}
        """By batch size."""
        self._drafted = False
        """Whether the latest step had drafts."""

    def of(self, batch_size: int) -> Cost | None:
        """None: the next step should have no drafts, to learn how long that takes."""
        times = self._times.get(batch_size)
        return None if times is None else times.cost(batch_size)

    def record(self, batch_size: int, drafted: int, seconds: float) -> None:
        """A step that computed nothing else took so long."""
        times = self._times.setdefault(batch_size, StepTimes())
        behind, self._drafted = self._drafted, drafted > 0
        if behind:
            times.add_behind(drafted, seconds)
        if drafted:
            times.add_drafted(drafted, seconds)
        elif not behind:
            times.add_plain(seconds)
        if drafted or behind:
            times.num_since_plain += 1
            if times.num_since_plain == REFRESH:
                times.num_plain_due = 1
