"""The distinct tokens of a sequence, as arrays that grow with it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GROWTH = 2


class PromptTokens:
    """The distinct tokens of a prompt; shared by all sequences of a request."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids: NDArray[np.int64] = np.unique(np.fromiter(prompt, np.int64, len(prompt)))
        """[P], ascending."""
        self.slots = {token: slot for slot, token in enumerate(self.ids.tolist())}


class SeenTokens:
    """Distinct tokens of prompt and output, in slots 0 to size - 1, with their numbers of occurrences in the output."""

    def __init__(self, prompt: PromptTokens) -> None:
        self._prompt = prompt
        self._slots: dict[int, int] = {}
        """Of tokens that only the output has."""
        self._size = len(prompt.ids)
        self._ids = prompt.ids
        self._counts = np.zeros(self._size, np.int64)

    @property
    def ids(self) -> NDArray[np.int64]:
        """[size]; valid until the next change, as `counts` is."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int64]:
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """One more occurrence in the output."""
        slot = self._find(token)
        if slot is None:
            slot = self._slots[token] = self._size
            if slot == len(self._ids):
                self._grow()
            self._ids[slot] = token
            self._size += 1
        self._counts[slot] += 1

    def remove(self, token: int) -> None:
        """Undo the latest `add`, which was of this token."""
        slot = self._slots.get(token)
        if slot is None:
            self._counts[self._prompt.slots[token]] -= 1
            return
        self._counts[slot] -= 1
        if not self._counts[slot]:
            # What was added last has the last slot.
            del self._slots[token]
            self._size -= 1

    def _find(self, token: int) -> int | None:
        slot = self._slots.get(token)
        return self._prompt.slots.get(token) if slot is None else slot

    def _grow(self) -> None:
        more = max(16, (GROWTH - 1) * self._size)
        # A copy, also of the prompt's, which other sequences share.
        self._ids = np.concatenate((self._ids, np.zeros(more, np.int64)))
        self._counts = np.concatenate((self._counts, np.zeros(more, np.int64)))
