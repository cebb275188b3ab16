"""What layers compute between matrix products, where a GPU has a kernel for it.

At a batch of one such a step costs as long as its launch takes, so their number counts. Each rounds to the model's type
wherever the operations that it stands for do.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Norm = Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
"""(x, update, weight, eps): adds the update, if there is one, to x [T, size] in place -> the RMSNorm of x by the weight
[size], [T, size]."""
Turn = Callable[[Tensor, tuple[Tensor, Tensor], Tensor | None, float], Tensor]
"""(x, rotations, weight, eps): x [T, heads, head_dim], heads side by side, each through an RMSNorm by its row of the
weight [heads, head_dim] if there is one -> rotated, [T, heads, head_dim]."""
Gate = Callable[[Tensor], Tensor]
"""x [T, 2 * size], gates and then what they gate, all side by side -> [T, size]."""


class Kernels(NamedTuple):
    """A launch each."""

    norm: Norm
    turn: Turn
    gate: Gate
