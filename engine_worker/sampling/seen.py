"""The distinct tokens of a sequence, as arrays that grow with it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEAST_GROWTH = 16


class PromptTokens:
    """The distinct tokens of a prompt; shared by all sequences of a request."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids: NDArray[np.int64] = np.unique(np.fromiter(prompt, np.int64, len(prompt)))
        """[P], ascending."""
        self.slots = {token: slot for slot, token in enumerate(self.ids.tolist())}


class SeenTokens:
    """Distinct tokens of prompt and output, in slots 0 to size - 1, each with the penalty for its occurrences in the
    output: presence + count * frequency."""

    def __init__(self, prompt: PromptTokens, presence: float = 0.0, frequency: float = 0.0) -> None:
        self._prompt = prompt
        self._presence, self._frequency = presence, frequency
        self._counts: dict[int, int] = {}
        """Occurrences of each token in the output."""
        self._slots: dict[int, int] = {}
        """Slots of the tokens that only the output has."""
        self._size = len(prompt.ids)
        # Shared with other sequences. The first token that the prompt lacks replaces it by a larger copy.
        self._ids = prompt.ids
        self._amounts = np.zeros(self._size, np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        """[size]; valid until the next change."""
        return self._ids[: self._size]

    @property
    def amounts(self) -> NDArray[np.float32]:
        """[size]: penalties of `ids`; valid until the next change."""
        return self._amounts[: self._size]

    def add(self, token: int) -> None:
        """Count one more occurrence in the output."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._prompt.slots.get(token)
        if slot is None:
            slot = self._new_slot(token)
        count = self._counts[token] = self._counts.get(token, 0) + 1
        self._amounts[slot] = self._amount(count)

    def remove(self, token: int) -> None:
        """Undo the latest `add`, which must have added this token."""
        count = self._counts[token] = self._counts[token] - 1
        slot = self._slots.get(token)
        if count or slot is None:
            self._amounts[self._prompt.slots[token] if slot is None else slot] = self._amount(count)
        else:
            # The token that was added last has the last slot.
            del self._slots[token]
            self._size -= 1

    def _amount(self, count: int) -> float:
        return self._presence + self._frequency * count if count else 0.0

    def _new_slot(self, token: int) -> int:
        slot = self._slots[token] = self._size
        if slot == len(self._ids):
            more = max(LEAST_GROWTH, slot)
            self._ids = np.concatenate((self._ids, np.zeros(more, np.int64)))
            self._amounts = np.concatenate((self._amounts, np.zeros(more, np.float32)))
        self._ids[slot] = token
        self._size += 1
        return slot
