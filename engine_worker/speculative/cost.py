"""The cost of drafts, learned from the durations of steps, and whether their gain exceeds it.

A plain step is one without drafts.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

RATE = 0.1
"""Weight of the latest step in moving averages."""
FASTER_RATE = 0.5
"""Weight of a plain step that took less than the average: disturbances only make steps longer."""
FORGETTING = 0.001
"""Weight with which each plain step moves a learned cost back to the expected one, so that drafts that were found too
expensive are tried again."""
LONGEST = 2.0
"""Limit on a duration, in multiples of the expected one: what exceeds it has other causes."""
FIRST = 3
"""Plain steps of each batch size before the first step with drafts."""
REFRESH = 128
"""Steps with drafts, or after a step with drafts, after which a plain step follows."""
LEAST = 0.01
"""Lower limit of `Cost.token`."""
TRUST_RATE = 0.05
"""Weight of the latest drafts in the average `_trust`."""
MARGIN = 1.3
"""Least ratio of expected gain to expected cost. More than 1, because both are estimates, and a loss is noticed
late."""


class Cost(NamedTuple):
    """The cost of a step's drafts, in tokens: those that plain steps would generate in the additional time."""

    step: float
    """Cost of having drafts at all."""
    token: float
    """Cost of each draft token; more than 0, at most 1."""


@dataclass(slots=True)
class Line:
    """The line excess = step + token · drafted, a least-squares fit to the latest steps. `drafted`: draft tokens of a
    step; `excess`: its additional duration, in plain steps. The fields are moving averages."""

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
"""The cost that is assumed before the first measurement."""


@dataclass(slots=True)
class StepTimes:
    """Durations of the steps of one batch size."""

    num_plain_due: int = FIRST
    """Plain steps that must precede the next step with drafts."""
    num_since_plain: int = 0
    plain: float = 0.0
    """Average seconds of a plain step."""
    line: Line = field(default_factory=Line)
    after: float = 0.0
    """Average excess of a plain step after one with drafts (0 if that step has drafts too): a step takes longer if its
    shape differs from that of the previous step."""

    def cost(self, batch_size: int) -> Cost | None:
        if self.num_plain_due:
            return None
        if not self.plain:
            # The clock does not advance, as in tests.
            return Cost(0.0, LEAST)
        step, token = self.line.step + max(0.0, self.after), self.line.token
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

    def add_after(self, drafted: int, seconds: float) -> None:
        """Add a step that followed one with drafts."""
        excess = 0.0 if drafted or not self.plain else min(seconds / self.plain, LONGEST) - 1
        self.after += RATE * (excess - self.after)


class DraftCost:
    """A plain step generates one token per sequence. So in a batch of b sequences, drafts that make a step longer by a
    fraction x of a plain step cost b·x tokens."""

    def __init__(self) -> None:
        self._times: dict[int, StepTimes] = {}
        """By batch size."""
        self._drafted = False
        """Whether the latest step had drafts."""

    def of(self, batch_size: int) -> Cost | None:
        """None if the next step should be plain, to measure the duration of plain steps."""
        times = self._times.get(batch_size)
        return None if times is None else times.cost(batch_size)

    def record(self, batch_size: int, drafted: int, seconds: float) -> None:
        """Record the duration of a step without context. `drafted`: its draft tokens."""
        times = self._times.setdefault(batch_size, StepTimes())
        after_drafts, self._drafted = self._drafted, drafted > 0
        if after_drafts:
            times.add_after(drafted, seconds)
        if drafted:
            times.add_drafted(drafted, seconds)
        elif not after_drafts:
            times.add_plain(seconds)
        if drafted or after_drafts:
            times.num_since_plain += 1
            if times.num_since_plain == REFRESH:
                times.num_plain_due = 1


class Gain:
    def __init__(self) -> None:
        self.cost = DraftCost()
        self._trust = 1.0
        """Average ratio of accepted tokens to expected ones."""
        self._expected = 0.0
        """Expected number of accepted tokens of the latest drafts."""
        self._accepted = 0
        """Accepted tokens of the latest drafts."""

    def pays(self, cost: Cost, expected: float, drafted: int) -> bool:
        """Whether drafts of `drafted` tokens are likely to pay. `expected`: expected number of accepted tokens."""
        return self._trust * expected >= MARGIN * (cost.step + cost.token * drafted)

    def of(self, cost: Cost | None, drafted: int) -> float:
        """Tokens that the latest drafts, of `drafted` tokens, have gained. `cost`: None if it is unknown."""
        return 0.0 if cost is None or not drafted else self._accepted - cost.step - cost.token * drafted

    def expect(self, accepted: float) -> None:
        """Record the expected number of accepted tokens of the next step."""
        self._expected, self._accepted = accepted, 0

    def record(self, accepted: int) -> None:
        """Record the number of accepted tokens of one sequence."""
        self._accepted += accepted

    def end_step(self, drafted: int) -> None:
        """Update the average ratio. `drafted`: draft tokens of the step, of all kinds."""
        if drafted and self._expected:
            self._trust += TRUST_RATE * (self._accepted / self._expected - self._trust)
            self._expected = 0.0
        elif self._trust != 1.0:
            # Trust recovers, so that drafts that did not pay are tried again.
            self._trust += FORGETTING * (1 - self._trust)
