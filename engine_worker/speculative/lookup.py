"""Drafts by prompt lookup (Saxena 2023): the tokens that followed an earlier occurrence of the last tokens.

A search takes time in a step, for each of its sequences; `LookupSchedule` decides how often to search.
"""

from collections.abc import Sequence

BITS = 32
"""Bits per token id in an n-gram. N-grams are integers, which, unlike tuples, the garbage collector ignores."""
PAIR = (1 << 2 * BITS) - 1
"""Mask of an n-gram's last two tokens."""
NO_TOKEN = (1 << BITS) - 1
"""Stands for the tokens before the first one."""
RATE = 0.125
"""Weight of the latest search in averages."""
MARGIN = 2.0
"""Least ratio of the tokens that searches gain to the tokens that their time costs. More than 1, because they also
evict a step's data from the CPU's caches."""
INTERVAL = 8
"""Steps per search while searches do not pay."""
EXPECTED = 1.0
"""Tokens that a search is assumed to gain before the first one."""

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


class LookupSchedule:
    """Averages the gain and the time of the latest searches. While they do not pay, most steps skip the search."""

    def __init__(self) -> None:
        self._gained = EXPECTED
        self._spent = 0.0
        """Time of a search, in tokens that steps without drafts generate in that time."""
        self._searched = False
        """Whether there was a search since the last `record`."""
        self._seconds = 0.0
        """Duration of that search."""
        self._pause = 0
        """Steps to skip before the next search."""

    @property
    def due(self) -> bool:
        return not self._pause

    def skip(self) -> None:
        self._pause -= 1

    def add(self, seconds: float) -> None:
        """Record the duration of a search."""
        self._searched, self._seconds = True, seconds

    def record(self, gained: float, tokens_per_second: float) -> None:
        """Record a step. `gained`: tokens that its drafts have gained; 0 if it had none. `tokens_per_second`: speed of
        steps without drafts."""
        if self._searched:
            self._searched = False
            self._gained += RATE * (gained - self._gained)
            self._spent += RATE * (self._seconds * tokens_per_second - self._spent)
            self._pause = INTERVAL - 1 if self._gained < MARGIN * self._spent else 0
