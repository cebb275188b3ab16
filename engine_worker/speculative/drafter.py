"""Guesses the next tokens of one sequence. Guesses never change the tokens that it gets, only how many per step."""

from collections.abc import Sequence

from engine_worker.speculative.lookup import Lookup
from engine_worker.speculative.pace import Pace


class Drafter:
    """By what the caller expects, while the output follows it; else by lookup in that, the prompt and the output."""

    def __init__(self, prompt: Sequence[int], most: int, expected: Sequence[int] = ()) -> None:
        """`most`: tokens per step. `expected`: tokens that the caller expects as the output, from its start."""
        self._pace = Pace(most)
        self._lookup = Lookup()
        # What the prompt ends with is followed by the output, not by what is expected.
        self._lookup.extend([*expected, *prompt] if expected else prompt)
        self._expected = tuple(expected)
        self._follows = bool(self._expected)
        """Whether the output has equalled `expected` so far."""
        self._fed = 0
        self.drafted = 0
        self.accepted = 0
        """Tokens since the start."""

    @property
    def paused(self) -> bool:
        """Nothing will be proposed for the next step."""
        return self._pace.paused

    def propose(self, output: Sequence[int], room: int, cost: float = 0.0) -> Sequence[int]:
        """At most `room` tokens that may follow `output`, which only grows. `cost`: of a drafted token, in tokens."""
        length = min(self._pace.next_length(cost), room)
        if length < 1:
            return ()
        fed, self._fed = self._fed, len(output)
        new = output[fed:]
        self._lookup.extend(new)
        if self._follows and self._expected[fed : self._fed] != tuple(new):
            self._follows = False
        found = self._expected[self._fed : self._fed + length] if self._follows else ()
        return found or self._lookup.propose(length)

    def record(self, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        self._pace.record(drafted, accepted)
