"""What a drafted token costs, learned from how long steps take."""

EXPECTED = 1 / 16
"""Of a step's time, before any is known."""
RATE = 0.1
"""Weight of the latest step in the averages."""
LONGEST = 2.0
"""A step that takes so many times longer than expected was held up by something else."""


class DraftCost:
    """A step without drafts gives one token per sequence. So in a batch of b sequences, a drafted token that makes the
    step longer by a part x of its time costs b·x tokens: it pays if it is accepted at least as often as that."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        """Seconds of a step without drafts, by batch size."""
        self._extra: dict[int, float] = {}
        """Part of that time for each drafted token, by batch size."""

    def of(self, batch_size: int) -> float:
        """In tokens, at most 1."""
        return min(1.0, batch_size * self._extra.get(batch_size, EXPECTED))

    def record(self, batch_size: int, drafted: int, seconds: float) -> None:
        """A step that computed nothing else took so long."""
        plain = self._plain.get(batch_size)
        if not drafted:
            known = seconds if plain is None else plain
            self._plain[batch_size] = known + RATE * (min(seconds, LONGEST * known) - known)
        elif plain:
            extra = self._extra.get(batch_size, EXPECTED)
            longest = LONGEST * plain * (1 + extra * drafted)
            found = max(0.0, min(seconds, longest) / plain - 1) / drafted
            self._extra[batch_size] = extra + RATE * (found - extra)
