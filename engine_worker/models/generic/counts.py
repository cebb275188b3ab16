"""Whether what a module computes hangs on its own count of the tokens in a step: found by following such numbers
through everything that is computed of them. It shows what would change in steps of thousands of tokens only."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

INDICES = ("index", "indices")
"""Names of arguments that say which numbers are taken, or where they go, but give none."""


class Counts(TorchDispatchMode):
    """While it is active: notes counts of `tokens`, a number that nothing else in the module should have, and what
    comes of them. Choosing rows by them is none of that: a table of positions shows where tokens change places."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self._counted: dict[int, Tensor] = {}
        """By memory, which stays theirs as long as they are here."""

    def reach(self, *tensors: Tensor) -> bool:
        """Whether a count is in one of them."""
        return any(_memory(tensor) in self._counted for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if self._counts(func, found) or self.reach(*_numbers(func, args, kwargs)):
            self._counted |= {_memory(tensor): tensor for tensor in _tensors(found)}
        return found

    def _counts(self, func: Any, found: Any) -> bool:
        name = func._schema.name
        if name == "aten::arange":
            return found.numel() == self._tokens
        return name in ("aten::cumsum", "aten::cumsum_") and self._tokens in found.shape


def _numbers(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors whose values go into the result."""
    named = zip((argument.name for argument in func._schema.arguments), args, strict=False)
    given = [value for name, value in (*named, *kwargs.items()) if name not in INDICES]
    return _tensors(given)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
