"""Drafts by prompt lookup (Saxena 2023): what followed the last tokens when they came before."""

from collections.abc import Sequence

SIZES = (3, 2)
"""N-grams that are looked up, the longest first."""


class Lookup:
    """The tokens of a sequence, and where each of its n-grams was last followed by something."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        """Position after the latest occurrence of an n-gram that another token follows."""

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        known, ends = self._tokens, self._ends
        for token in tokens:
            # Only now does something follow the n-grams that end here.
            end = len(known)
            for size in SIZES:
                if end >= size:
                    ends[tuple(known[end - size :])] = end
            known.append(token)

    def propose(self, most: int) -> list[int]:
        """Up to `most` tokens."""
        known = self._tokens
        for size in SIZES:
            if len(known) >= size and (end := self._ends.get(tuple(known[-size:]))) is not None:
                return known[end : end + most]
        return []
