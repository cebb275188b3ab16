"""Decides whether drafts of one kind gain more tokens than they cost."""

from engine_worker.speculative.cost import FORGETTING, Cost, DraftCost

TRUST_RATE = 0.05
"""Weight of the latest drafts in the average of `_trust`."""
MARGIN = 1.3
"""Least ratio of expected gain to expected cost. More than 1, because both are estimates, and a loss is noticed
late."""


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
        """Whether drafts of `drafted` tokens should pay. `expected`: expected number of accepted tokens."""
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
        """Update the average. `drafted`: draft tokens of the step, of all kinds."""
        if drafted and self._expected:
            self._trust += TRUST_RATE * (self._accepted / self._expected - self._trust)
            self._expected = 0.0
        elif self._trust != 1.0:
            # Recovers, so that drafts that did not pay are tried again.
            self._trust += FORGETTING * (1 - self._trust)
