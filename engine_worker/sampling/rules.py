"""The rules that `logit_rules` consists of: each edits the next logits depending on the tokens so far."""

from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray


class Penalized(NamedTuple):
    """P tokens, at least one: positive logits are divided and negative ones multiplied by `repetition`, then `amounts`
    are subtracted."""

    ids: NDArray[np.int64]
    """[P], distinct."""
    repetition: float
    amounts: NDArray[np.float32] | None
    """[P]; None: zeros."""


class Edits(msgspec.Struct, eq=False):
    """Edits of one row of logits."""

    banned: list[NDArray[np.int64]] = []
    """Token ids, possibly repeated."""
    penalized: Penalized | None = None

    def __bool__(self) -> bool:
        return bool(self.banned) or self.penalized is not None


class Rule(Protocol):
    """One feature of one sequence. Its state is a function of the tokens that it was fed.

    `tokens`: the last tokens of the prompt, as many as any rule reads, and all output tokens so far.
    """

    def feed(self, tokens: list[int]) -> None:
        """The last of `tokens` is new."""

    def undo(self, tokens: list[int]) -> None:
        """The last of `tokens`, which was fed last, is about to be removed."""

    def edit(self, tokens: list[int], edits: Edits) -> None:
        """Add the edits for the next token. What is added must not change later."""
