"""The rows of a step that a product on a CPU reads and adds to, grouped by adapter."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.lora.placed import Group


class Rows(Protocol):
    """Of one or more adapters, one after the other, the same number of each."""

    @property
    def size(self) -> int:
        """N."""

    def take(self, x: Tensor) -> Tensor:
        """[N, width] of [T, width], contiguous: a view or a copy. Padding makes the numbers equal."""

    def put(self, out: Tensor, taken: Tensor) -> None:
        """Write back to `out` what `take(out)` returned and the product changed."""


def choose_rows(groups: Sequence[Group], multiple: int) -> Rows:
    """The same number of each group, a multiple of `multiple`."""
    tokens = np.concatenate([group.tokens for group in groups])
    longest = max(len(group.tokens) for group in groups)
    size = -(-longest // multiple) * multiple
    first = int(tokens[0])
    if len(tokens) == len(groups) * size and np.array_equal(tokens, np.arange(first, first + len(tokens))):
        return RowRange(first, len(tokens))
    padded = np.concatenate([_padded(group.tokens, size) for group in groups])
    used = np.concatenate([i * size + np.arange(len(group.tokens)) for i, group in enumerate(groups)])
    return PickedRows(*(torch.from_numpy(each) for each in (tokens, padded, used)))


class RowRange(NamedTuple):
    """Consecutive ones, as a step has them if its sequences are sorted by adapter: nothing is copied."""

    first: int
    size: int

    def take(self, x: Tensor) -> Tensor:
        return x if x.shape[0] == self.size else x.narrow(0, self.first, self.size)

    def put(self, out: Tensor, taken: Tensor) -> None:
        """Nothing is left to do: `take` returned a view."""


class PickedRows(NamedTuple):
    tokens: Tensor
    """[M], each once."""
    padded: Tensor
    """[N]: the same, and others where a group has too few."""
    used: Tensor
    """[M]: where they are in `padded`."""

    @property
    def size(self) -> int:
        return len(self.padded)

    def take(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.padded)

    def put(self, out: Tensor, taken: Tensor) -> None:
        if len(self.used) < len(self.padded):
            taken = taken.index_select(0, self.used)
        if out.dtype is not torch.float32 or torch.get_num_threads() == 1:
            out.index_copy_(0, self.tokens, taken)
            return
        # By numpy: torch wakes the other threads for a few rows, which takes a hundred times as long as the copy.
        out.numpy()[self.tokens.numpy()] = taken.numpy()


def _padded(tokens: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return np.concatenate((tokens, np.zeros(size - len(tokens), np.int64)))
