"""Guesses the next tokens of one sequence. Guesses never change the tokens that it gets, only how many per step."""

from collections.abc import Sequence

from engine_worker.speculative.lookup import Lookup
from engine_worker.speculative.pace import EXPECTED, EXPECTED_OF_CALLER, Pace


def begin_lookup(prompt: Sequence[int], expected: Sequence[int] = ()) -> Lookup:
    """Of what is known before the output. Takes as long as the prompt is."""
    found = Lookup()
    # What the prompt ends with is followed by the output, not by what is expected.
    found.extend([*expected, *prompt] if expected else prompt)
    return found


class Drafter:
    """By what the caller expects, while the output follows it; else by lookup in that, the prompt and the output.

    Where there is a draft model, its guesses replace lookups; `Drafting` asks for them.
    """

    def __init__(
        self, begun: Lookup, max_tokens: int, expected: Sequence[int] = (), *, has_model: bool = False
    ) -> None:
        """`begun`: see `begin_lookup`; the sequences of a request share it. `max_tokens`: tokens per step. `expected`:
        tokens that the caller expects as the output, from its start."""
        self._pace = Pace(max_tokens, EXPECTED_OF_CALLER if expected else EXPECTED)
        self.model_pace = Pace(max_tokens) if has_model else None
        """None: there is no draft model."""
        self._lookup = Lookup(begun)
        self._expected = tuple(expected)
        self._follows = bool(self._expected)
        """Whether the output has equalled `expected` so far."""
        self._fed = 0
        self._guess: int | None = None
        """Of the token after those fed."""
        self.by_model = False
        """Whether the draft model has made the latest proposal."""
        self.drafted = 0
        self.accepted = 0
        """Tokens since the start."""

    def follows(self, output: Sequence[int]) -> bool:
        """Whether the output, which only grows, is what the caller expects, and more of that is left."""
        self._feed(output)
        return self._follows and self._fed < len(self._expected)

    def pays(self, cost: float) -> bool:
        """Whether it would draft, if it finds what to draft. `cost`: of a drafted token, in tokens."""
        return self._pace.length(cost) > 0

    def propose(self, output: Sequence[int], room: int, cost: float) -> Sequence[int]:
        """At max_tokens `room` tokens that may follow `output`, which only grows. `cost`: see `pays`."""
        self._feed(output)
        self.by_model = False
        length = self._pace.length(cost)
        found = self._find(max(1, length))
        # Learned from even if it is not drafted, which costs nothing.
        self._guess = found[0] if found else None
        return found[: max(0, min(length, room))]

    def expects(self, drafted: int) -> float:
        """How many tokens of a draft of this length are accepted."""
        return self._pace.expects(drafted)

    def record(self, drafted: int, accepted: int) -> None:
        """Of the latest proposal, which was computed."""
        self._guess = None
        self.drafted += drafted
        self.accepted += accepted
        if self.by_model and self.model_pace is not None:
            self.model_pace.record(drafted, accepted)
        else:
            self._pace.record(drafted, accepted)

    def _feed(self, output: Sequence[int]) -> None:
        if len(output) == self._fed:
            return
        new = output[self._fed :]
        if self._guess is not None:
            self._pace.record(1, int(self._guess == new[0]))
            self._guess = None
        if self._follows and self._expected[self._fed : self._fed + len(new)] != tuple(new):
            self._follows = False
        self._lookup.extend(new)
        self._fed += len(new)

    def _find(self, length: int) -> Sequence[int]:
        found = self._expected[self._fed : self._fed + length] if self._follows else ()
        return found or self._lookup.propose(length)
