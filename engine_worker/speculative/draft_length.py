"""Decides how many tokens to draft for a sequence, from the accuracy of its drafts so far."""

from math import log

from engine_worker.speculative.cost import FORGETTING

RATE = 0.125
"""Weight of the latest draft token in the average."""
EXPECTED = 0.5
"""Accuracy that is assumed before the first draft."""
EXPECTED_OF_CALLER = 0.8
"""The same for draft tokens from the caller."""
MAX_ACCURACY = 0.99


class DraftLength:
    """A token is drafted if its probability to be accepted is at least its cost. A draft token after k others is
    accepted only if these are: with the probability of a single one to the power of k + 1."""

    def __init__(self, max_tokens: int, accuracy: float = EXPECTED) -> None:
        """`max_tokens`: limit on draft tokens per step."""
        self._max_tokens = max_tokens
        self.accuracy = accuracy
        """Average probability that a single draft token is accepted."""

    def length(self, cost: float) -> int:
        """Tokens to draft. `cost`: of a draft token, in tokens; more than 0."""
        if self.accuracy <= cost:
            return 0
        return min(self._max_tokens, max(1, int(log(cost) / log(self.accuracy))))

    def expects(self, drafted: int) -> float:
        """Expected number of accepted tokens of a draft of this length."""
        single = self.accuracy
        return single * (1 - single**drafted) / (1 - single)

    def forget(self) -> None:
        """Move the accuracy towards the expected one; called in steps without a draft, so that drafting is tried again
        even if it was inaccurate."""
        self.accuracy += FORGETTING * (EXPECTED - self.accuracy)

    def record(self, drafted: int, accepted: int) -> None:
        """Record that the first `accepted` of `drafted` tokens were accepted."""
        self.accuracy = min(MAX_ACCURACY, 1 - (1 - self.accuracy) * (1 - RATE) ** accepted)
        if accepted < drafted:
            self.accuracy -= RATE * self.accuracy
