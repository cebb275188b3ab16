"""Drafts by prompt lookup (Saxena 2023): what followed the last tokens when they came before."""

from collections.abc import Mapping, Sequence

SIZES = (3, 2)
"""N-grams that are looked up, the longest first."""


class Lookup:
    """The last tokens of a sequence, and what followed each of its n-grams.

    A guess is what followed the last two times, or the only time. Where these differ the next token is rarely either:
    sampled code accepts a third of such guesses and four fifths of the others.
    """

    def __init__(self, begun: "Lookup | None" = None) -> None:
        """`begun`: what came before, itself from the start. It may not change any more; several may go on from it."""
        self._tail: list[int] = [] if begun is None else begun._tail.copy()
        """The last tokens, at limit as many as the longest n-gram has."""
        self._next: dict[tuple[int, ...], int] = {}
        """By n-gram: what followed it last; if something else did before, the complement of that: a negative number."""
        self._begun: Mapping[tuple[int, ...], int] = {} if begun is None else begun._next
        """The same for those that have not come since."""

    def extend(self, tokens: Sequence[int]) -> None:
        tail, followed, begun = self._tail, self._next, self._begun
        for token in tokens:
            for size in SIZES:
                if len(tail) >= size:
                    key = tuple(tail[-size:])
                    before = followed[key] if key in followed else begun.get(key, token)
                    followed[key] = token if before in (token, ~token) else ~token
            tail.append(token)
            del tail[: -SIZES[0]]

    def propose(self, limit: int) -> list[int]:
        """Up to `limit` tokens, each looked up after those before it."""
        tail = self._tail
        found: list[int] = []
        while len(found) < limit and (token := self._after(tail)) is not None:
            found.append(token)
            tail = [*tail[-SIZES[0] + 1 :], token]
        return found

    def _after(self, tail: list[int]) -> int | None:
        for size in SIZES:
            if len(tail) >= size:
                key = tuple(tail[-size:])
                token = self._next.get(key, self._begun.get(key))
                if token is not None:
                    return token if token >= 0 else None
        return None
