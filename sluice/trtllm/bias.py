"""`embedding_bias`, a tensor over the vocabulary, as what a request can say."""

import math
from dataclasses import dataclass
from typing import Any

UNBOUNDED = 1e4
"""A bias beyond this decides alone: no model's logits are that far apart."""


@dataclass(frozen=True, slots=True)
class Bias:
    added: dict[int, float]
    banned: list[int]
    forced: list[int]
    """Only these can be chosen."""


def read_bias(tensor: Any, vocab_size: int) -> Bias | str:
    """A text is why the tensor cannot be used."""
    if tuple(tensor.shape) != (vocab_size,):
        return f"embedding bias shape is not as expected: it is {list(tensor.shape)}, must be [{vocab_size}]"
    given = {token: float(value) for token, value in enumerate(tensor.tolist()) if value != 0}
    if any(map(math.isnan, given.values())):
        return "embedding bias must not be NaN"
    highest = max(given.values(), default=0.0)
    return Bias(
        added={token: value for token, value in given.items() if abs(value) <= UNBOUNDED},
        banned=[token for token, value in given.items() if value < -UNBOUNDED],
        # Among several such tokens the highest bias decides.
        forced=[token for token, value in given.items() if value == highest] if highest > UNBOUNDED else [],
    )
