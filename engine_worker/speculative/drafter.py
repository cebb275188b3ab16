"""Drafts the next tokens of one sequence. Drafts never change its tokens, only how many it gains per step."""

from collections.abc import Sequence
from math import log

from engine_worker.speculative.cost import FORGETTING
from engine_worker.speculative.lookup import Lookup

RATE = 0.125
"""Weight of the latest draft token in the average."""
EXPECTED = 0.5
"""Accuracy that is assumed before the first draft."""
EXPECTED_OF_CALLER = 0.8
"""The same for draft tokens from the caller."""
MAX_ACCURACY = 0.99


class DraftLength:
    """Decides how many tokens to draft: each whose probability of being accepted is at least its cost. A draft token
    after k others is accepted only if they are, so its probability is that of a single one to the power of k + 1."""

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


def begin_lookup(prompt: Sequence[int], expected: Sequence[int] = ()) -> Lookup:
    """A lookup over the tokens that are known before the output. Its cost grows with the prompt. `expected`: see
    `Drafter`."""
    lookup = Lookup()
    # The prompt comes last, because the output follows it.
    lookup.extend([*expected, *prompt] if expected else prompt)
    return lookup


class Drafter:
    """Drafts by the output that the caller expects, while the output follows it; otherwise by lookup in the expected
    output, the prompt and the output so far.

    Where there is a draft model, its drafts replace lookups; see `Drafting`.
    """

    def __init__(
        self, begun: Lookup, max_tokens: int, expected: Sequence[int] = (), *, has_model: bool = False
    ) -> None:
        """`begun`: from `begin_lookup`; the sequences of a request share it. `max_tokens`: limit on draft tokens per
        step. `expected`: the output that the caller expects, from its start."""
        self._pace = DraftLength(max_tokens, EXPECTED_OF_CALLER if expected else EXPECTED)
        self.model_pace = DraftLength(max_tokens) if has_model else None
        """The pace of the draft model's drafts; None: there is no draft model."""
        self._lookup = Lookup(begun)
        self._expected = tuple(expected)
        self._follows = bool(self._expected)
        """Whether the output has equalled `expected` so far."""
        self._fed = 0
        """Output tokens processed so far."""
        self._next_token: int | None = None
        """Prediction of the token after these, if there is one."""
        self.by_model = False
        """Whether the draft model has made the latest draft."""
        self.drafted = 0
        """Draft tokens since the start."""
        self.accepted = 0
        """Accepted draft tokens since the start."""

    def follows(self, output: Sequence[int]) -> bool:
        """Whether `output`, which only grows, is the beginning of the expected output."""
        self._feed(output)
        return self._follows and self._fed < len(self._expected)

    def pays(self, cost: float) -> bool:
        """Whether its drafts are accurate enough. `cost`: of a draft token, in tokens."""
        return self._pace.length(cost) > 0

    def propose(self, output: Sequence[int], room: int, cost: float) -> Sequence[int]:
        """At most `room` tokens that may follow `output`, which only grows. `cost`: see `pays`."""
        self._feed(output)
        self.by_model = False
        length = self._pace.length(cost)
        tokens = self._find(max(1, length))
        # Its accuracy is recorded even if nothing is drafted: that is free.
        self._next_token = tokens[0] if tokens else None
        return tokens[: max(0, min(length, room))]

    def expects(self, drafted: int) -> float:
        """Expected number of accepted tokens of a draft of this length."""
        return self._pace.expects(drafted)

    def record(self, drafted: int, accepted: int) -> None:
        """Record the result of the latest draft, after its step was committed."""
        self._next_token = None
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
        if self._next_token is not None:
            self._pace.record(1, int(self._next_token == new[0]))
            self._next_token = None
        if self._follows and self._expected[self._fed : self._fed + len(new)] != tuple(new):
            self._follows = False
        self._lookup.extend(new)
        self._fed += len(new)

    def _find(self, length: int) -> Sequence[int]:
        expected = self._expected[self._fed : self._fed + length] if self._follows else ()
        return expected or self._lookup.propose(length)
