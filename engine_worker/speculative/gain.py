"""Whether drafts of one kind bring more tokens than they cost."""

from engine_worker.speculative.cost import FORGETTING, Cost, DraftCost

TRUST_RATE = 0.05
MARGIN = 1.3
"""What drafts must bring by what they cost. More than 1: both are estimates, and a loss is noticed only after it."""


class Gain:
    def __init__(self) -> None:
        self.cost = DraftCost()
        self._trust = 1.0
        """Tokens that were accepted by those that should have been, on average."""
        self._expected = 0.0
        """Tokens of the latest drafts that should be accepted."""
        self._accepted = 0
        """Of them."""

    def pays(self, cost: Cost, expected: float, drafted: int) -> bool:
        """Whether a step should draft so many tokens, of which so many should be accepted."""
        return self._trust * expected >= MARGIN * (cost.step + cost.token * drafted)

    def of(self, cost: Cost | None, drafted: int) -> float:
        """Tokens that the latest drafts gained, where there were so many. `cost`: None where it is unknown."""
        return 0.0 if cost is None or not drafted else self._accepted - cost.step - cost.token * drafted

    def expect(self, accepted: float) -> None:
        """The next step has drafts, of which so many tokens should be accepted."""
        self._expected, self._accepted = accepted, 0

    def record(self, accepted: int) -> None:
        """Of one sequence's drafts."""
        self._accepted += accepted

    def end_step(self, drafted: int) -> None:
        """`drafted`: tokens of the step, of any kind."""
        if drafted and self._expected:
            self._trust += TRUST_RATE * (self._accepted / self._expected - self._trust)
            self._expected = 0.0
        elif self._trust != 1.0:
            # What did not pay is tried again.
            self._trust += FORGETTING * (1 - self._trust)
