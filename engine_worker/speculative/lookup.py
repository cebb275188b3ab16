"""Drafts by prompt lookup (Saxena 2023): what followed the last tokens when they came before."""

from collections.abc import Sequence

BITS = 32
"""Of a token's id. N-grams are numbers of so many bits per token: unlike tuples, the garbage collector ignores them."""
PAIR = (1 << 2 * BITS) - 1
NO_TOKEN = (1 << BITS) - 1
"""In place of those before the first."""

Followers = dict[int, int]
"""By n-gram: what followed it last; if something else did before, the complement of that: a negative number."""


class Lookup:
    """The last tokens of a sequence, and what followed each of its n-grams of three and of two tokens.

    A guess is what followed the last two times, or the only time. Where these differ the next token is rarely either:
    sampled code accepts a third of such guesses and four fifths of the others. Triples are looked up before pairs.
    """

    def __init__(self, begun: "Lookup | None" = None) -> None:
        """`begun`: what came before, itself from the start. It may not change any more; several may go on from it."""
        self._last: int = NO_TOKEN << 2 * BITS | NO_TOKEN << BITS | NO_TOKEN if begun is None else begun._last
        """The triple of the last tokens."""
        self._triples: Followers = {}
        self._pairs: Followers = {}
        self._begun: tuple[Followers, Followers] = ({}, {}) if begun is None else (begun._triples, begun._pairs)
        """Triples and pairs; those that have come since may be outdated."""

    def extend(self, tokens: Sequence[int]) -> None:
        # For every token of every sequence.
        last, triples, pairs = self._last, self._triples, self._pairs
        begun_triples, begun_pairs = self._begun
        for token in tokens:
            before = triples[last] if last in triples else begun_triples.get(last, token)
            triples[last] = token if before == token or before == ~token else ~token
            pair = last & PAIR
            before = pairs[pair] if pair in pairs else begun_pairs.get(pair, token)
            pairs[pair] = token if before == token or before == ~token else ~token
            last = pair << BITS | token
        self._last = last

    def propose(self, limit: int) -> list[int]:
        """Up to `limit` tokens, each looked up after those before it."""
        last, found = self._last, list[int]()
        while len(found) < limit and (token := self._after(last)) is not None and token >= 0:
            found.append(token)
            last = (last & PAIR) << BITS | token
        return found

    def _after(self, triple: int) -> int | None:
        begun_triples, begun_pairs = self._begun
        token = self._triples.get(triple)
        if token is None:
            token = begun_triples.get(triple)
        if token is None:
            pair = triple & PAIR
            token = self._pairs.get(pair, begun_pairs.get(pair))
        return token
