"""How many tokens to draft for a sequence, by how its drafts fared."""

FIRST = 4
LONGEST_PAUSE = 64
"""Steps."""


class Pace:
    """Doubles after a draft that was accepted to its end; pauses after one that brought less than it cost.

    In a batch, a token that is drafted for one sequence makes the step longer for all of them: a draft is worth it if
    half as many tokens are accepted as the step has sequences. Pauses double with each draft that was not, and halve
    with each that was.
    """

    def __init__(self, most: int) -> None:
        """`most`: tokens per step."""
        self._most = most
        self._length = min(FIRST, most)
        self._least = 1
        """Accepted tokens that are worth a draft."""
        self._pause = 1
        self._left = 0

    def next_length(self, batch_size: int) -> int:
        """For a step of so many sequences; 0: draft nothing."""
        if self._left:
            self._left -= 1
            return 0
        self._least = (batch_size + 1) // 2
        return min(max(self._length, self._least), self._most)

    def record(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens, at least one, the first `accepted` were drawn."""
        if accepted >= min(self._least, drafted):
            self._pause = max(1, self._pause // 2)
            self._length = min(self._most, 2 * drafted if accepted == drafted else accepted + 1)
        else:
            self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
            self._length = 1 if self._most else 0
