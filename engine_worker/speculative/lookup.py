"""Drafts by prompt lookup (Saxena 2023): the tokens that followed an earlier occurrence of the last tokens."""

from collections.abc import Sequence

BITS = 32
"""Bits per token id in an n-gram. N-grams are integers, which, unlike tuples, the garbage collector ignores."""
PAIR = (1 << 2 * BITS) - 1
"""Mask of an n-gram's last two tokens."""
NO_TOKEN = (1 << BITS) - 1
"""Stands for the tokens before the first one."""

Followers = dict[int, int]
"""By n-gram: the token that followed its latest occurrence or, if another token followed the one before, the bitwise
complement of that token, which is negative."""


class Lookup:
    """The last tokens of a sequence, and the tokens that followed each of its n-grams of three and of two tokens.

    A draft token is the one that followed the last two occurrences, or the only one. Where these differ, the next token
    is rarely either of them: in sampled code a third of such draft tokens is accepted, of the others four fifths.
    Triples are looked up before pairs.
    """

    def __init__(self, begun: "Lookup | None" = None) -> None:
        """`begun`: a lookup over the tokens before, created without `begun`. It must no longer change, and may be
        shared."""
        self._last: int = NO_TOKEN << 2 * BITS | NO_TOKEN << BITS | NO_TOKEN if begun is None else begun._last
        """The triple of the last tokens."""
        self._triples: Followers = {}
        self._pairs: Followers = {}
        self._begun: tuple[Followers, Followers] = ({}, {}) if begun is None else (begun._triples, begun._pairs)
        """Triples and pairs of `begun`. Entries of `_triples` and `_pairs` take precedence."""

    def extend(self, tokens: Sequence[int]) -> None:
        # Inlined, because it runs for every token of every sequence.
        last, triples, pairs = self._last, self._triples, self._pairs
        begun_triples, begun_pairs = self._begun
        for token in tokens:
            previous = triples[last] if last in triples else begun_triples.get(last, token)
            triples[last] = token if previous == token or previous == ~token else ~token
            pair = last & PAIR
            previous = pairs[pair] if pair in pairs else begun_pairs.get(pair, token)
            pairs[pair] = token if previous == token or previous == ~token else ~token
            last = pair << BITS | token
        self._last = last

    def propose(self, limit: int) -> list[int]:
        """Up to `limit` tokens, each looked up by the tokens before it."""
        last, tokens = self._last, list[int]()
        while len(tokens) < limit and (token := self._after(last)) is not None and token >= 0:
            tokens.append(token)
            last = (last & PAIR) << BITS | token
        return tokens

    def _after(self, triple: int) -> int | None:
        begun_triples, begun_pairs = self._begun
        token = self._triples.get(triple)
        if token is None:
            token = begun_triples.get(triple)
        if token is None:
            pair = triple & PAIR
            token = self._pairs.get(pair, begun_pairs.get(pair))
        return token
