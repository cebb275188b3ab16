"""Whether two systems mean the same by the next token.

Random weights make near-ties common, and rounding decides those. So logprobs are compared, and tokens only where one
leads clearly.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from engine_worker.step import Drawn

TOLERANCES = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.02}
"""Of logprobs, between two ways to compute the same: bfloat16 keeps 8 bits, so a logit of 2 to 4 moves in steps of
1/64. Unrelated logits of a random model differ by about 1, and have no likely tokens in common."""
COMMON = 0.5
"""Share of the likeliest tokens that both must name."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of many pairs."""

    pairs: int
    clear: int
    """Where one token leads by more than twice the tolerance."""
    agreed: int
    """Of these, where both took it."""
    difference: float
    """The largest, of logprobs."""
    tolerance: float

    @property
    def passed(self) -> bool:
        """They mean the same."""
        return self.pairs > 0 and self.agreed == self.clear and self.difference <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{self.pairs} tokens: logprobs differ by {self.difference:.2g} at most (allowed {self.tolerance:.2g}); "
            f"{self.agreed} of {self.clear} clear choices agree"
        )


def verdict(pairs: Iterable[tuple[Drawn, Drawn]], tolerance: float) -> Verdict:
    """Of draws with alternatives, after the same tokens."""
    count, clear, agreed, most = 0, 0, 0, 0.0
    for ours, theirs in pairs:
        count += 1
        most = max(most, difference(alternatives(ours), alternatives(theirs)))
        if lead(theirs) > 2 * tolerance:
            clear += 1
            agreed += ours.token == theirs.token
    return Verdict(count, clear, agreed, most, tolerance)


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """The largest, of the tokens that both name; infinite where they name few in common."""
    both = ours.keys() & theirs.keys()
    if len(both) < COMMON * min(len(ours), len(theirs)):
        return inf
    return max((abs(ours[token] - theirs[token]) for token in both), default=inf)


def alternatives(drawn: Drawn) -> dict[int, float]:
    """Logprobs of the likeliest tokens; none where the draw failed."""
    return {} if drawn.logprob is None else dict(drawn.logprob.top)


def lead(drawn: Drawn) -> float:
    """Of the likeliest token before the next, in logprobs."""
    top = sorted(alternatives(drawn).values(), reverse=True)
    return top[0] - top[1] if len(top) > 1 else 0.0


def together(ours: Sequence[Drawn], theirs: Sequence[Drawn]) -> Iterator[tuple[Drawn, Drawn]]:
    """Of two continuations of the same tokens, as far as they are the same, and where they part."""
    for pair in zip(ours, theirs, strict=True):
        yield pair
        if pair[0].token != pair[1].token:
            return
