"""How many tokens to draft for a sequence, by how its drafts fared."""

FIRST = 4
LONGEST_PAUSE = 64
"""Steps."""
HOPE = 0.5
"""The first gain."""
RATE = 0.25
"""Weight of the latest draft in the average."""
LEAST_GAIN, MOST_GAIN = -0.2, 1.0
"""Of the average, so that one long draft does not outweigh what follows it."""


class Pace:
    """A draft gains what is accepted of it less what it costs, in tokens. While drafts gain on average, their length
    doubles after one that was accepted whole, and else is what was accepted plus one. While they do not, each is one
    token, and a pause follows it that is twice as long as the one before."""

    def __init__(self, most: int) -> None:
        """`most`: tokens per step."""
        self._most = most
        self._length = min(FIRST, most)
        self._gain = HOPE
        self._cost = 0.0
        self._pause = 1
        self._left = 0

    @property
    def paused(self) -> bool:
        """The next step has no draft."""
        return self._left > 0

    def next_length(self, cost: float) -> int:
        """For one step, where a drafted token costs so many tokens; 0: draft nothing."""
        if self._left:
            self._left -= 1
            return 0
        self._cost = cost
        return self._length

    def record(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens, at least one, the first `accepted` were drawn."""
        gain = self._gain + RATE * (accepted - self._cost * drafted - self._gain)
        self._gain = min(max(gain, LEAST_GAIN), MOST_GAIN)
        if self._gain >= 0:
            self._pause = max(1, self._pause // 2)
            self._length = min(self._most, 2 * drafted if accepted == drafted else accepted + 1)
        else:
            self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
            self._length = min(1, self._most)
