"""How many tokens to draft for a sequence, by how good the guesses for it have been."""

from math import log

from engine_worker.speculative.cost import FORGETTING

RATE = 0.125
"""Weight of the latest guess in the average."""
EXPECTED, EXPECTED_OF_CALLER = 0.5, 0.8
"""Accuracy before any guess; of those that the caller provides."""
MAX_ACCURACY = 0.99


class Pace:
    """A token is drafted as long as it is more likely to be accepted than what it costs. The guess behind k others is
    accepted only if these are, so with the accuracy of a single guess to the power of k + 1."""

    def __init__(self, max_tokens: int, accuracy: float = EXPECTED) -> None:
        """`max_tokens`: tokens per step."""
        self._max_tokens = max_tokens
        self.accuracy = accuracy
        """Of a single guess, on average."""

    def length(self, cost: float) -> int:
        """Of a draft, where a drafted token costs so many tokens, more than 0."""
        if self.accuracy <= cost:
            return 0
        return min(self._max_tokens, max(1, int(log(cost) / log(self.accuracy))))

    def expects(self, drafted: int) -> float:
        """How many tokens of such a draft are accepted."""
        single = self.accuracy
        return single * (1 - single**drafted) / (1 - single)

    def forget(self) -> None:
        """A step without a guess: what was found too bad is tried again."""
        self.accuracy += FORGETTING * (EXPECTED - self.accuracy)

    def record(self, guessed: int, right: int) -> None:
        """Of `guessed` tokens the first `right` came."""
        self.accuracy = min(MAX_ACCURACY, 1 - (1 - self.accuracy) * (1 - RATE) ** right)
        if right < guessed:
            self.accuracy -= RATE * self.accuracy
