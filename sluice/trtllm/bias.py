"""`embedding_bias`, a tensor over the vocabulary, in the form of `SamplingParams`."""

import math
from dataclasses import dataclass
from typing import Any

UNBOUNDED = 1e4
"""A bias of a larger magnitude bans or forces its token, since no model's logits are that far apart."""


@dataclass(frozen=True, slots=True)
class Bias:
    added: dict[int, float]
    """Bias by token id."""
    banned: list[int]
    """Token ids that must not be generated."""
    forced: list[int]
    """If not empty, the only token ids that may be generated."""


def read_bias(tensor: Any, vocab_size: int) -> Bias | str:
    """Split a tensor [vocab_size] of biases. Returns an error message if it cannot be used."""
    if tuple(tensor.shape) != (vocab_size,):
        return f"embedding bias shape is not as expected: it is {list(tensor.shape)}, must be [{vocab_size}]"
    biases = {token: float(value) for token, value in enumerate(tensor.tolist()) if value != 0}
    if any(map(math.isnan, biases.values())):
        return "embedding bias must not be NaN"
    highest = max(biases.values(), default=0.0)
    return Bias(
        added={token: value for token, value in biases.items() if abs(value) <= UNBOUNDED},
        banned=[token for token, value in biases.items() if value < -UNBOUNDED],
        # Among several tokens above UNBOUNDED, only those with the highest bias can win.
        forced=[token for token, value in biases.items() if value == highest] if highest > UNBOUNDED else [],
    )
