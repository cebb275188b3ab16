"""The base class of all layers, and the interface of fused kernels.

Layers are plain Python objects that hold tensors: torch.nn.Module spends a tenth of a small model's step on its hooks.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from engine_worker.layers.packing import Packer
from engine_worker.layers.shard import Cut


class FusedKernels(NamedTuple):
    """The element-wise work between matrix products, one GPU launch each, and the products of a single row.

    At batch size 1 an operation takes as long as its launch, so the number of launches counts, and a product as long as
    reading its weight, which the libraries' kernels, made for more rows, do not do at full speed. Each kernel rounds to
    the model's dtype wherever the torch operations it replaces do.
    """

    norm: Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
    """(x, update, weight, eps): adds update, if given, to x [T, size] in place -> RMSNorm of x by weight [size],
    [T, size]."""
    rotate: Callable[[Tensor, tuple[Tensor, Tensor], Tensor | None, float], Tensor]
    """(x, rotations, weight, eps): x [T, heads, head_dim], heads contiguous, first through an RMSNorm per head by
    weight [heads, head_dim] if given -> rotated x, [T, heads, head_dim]."""
    gate: Callable[[Tensor], Tensor]
    """x [T, 2 * size], contiguous, gates before values -> silu(gates) * values, [T, size]."""
    product: Callable[[Tensor, Tensor], Tensor]
    """(x [1, inputs], weight [outputs, inputs], contiguous) -> x Wᵀ, [1, outputs]."""


class Layer:
    """Public tensor attributes are its weights; public attributes that are layers, or lists of layers, its children."""

    _kernels: FusedKernels | None = None

    def children(self) -> Iterator[tuple[str, "Layer"]]:
        """Child layers by name; those in a list by name and index, as in "layers.0"."""
        for name, value in vars(self).items():
            if isinstance(value, Layer):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}.{i}", child) for i, child in enumerate(value))

    def targets(self, prefix: str = "") -> dict[str, Tensor]:
        """Views to load the weights into before `freeze`, by the checkpoint's tensor names."""
        found = {
            prefix + name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and not name.startswith("_")
        }
        for name, child in self.children():
            found |= child.targets(f"{prefix}{name}.")
        return found

    def cuts(self, prefix: str = "") -> dict[str, Cut]:
        """Which slice of the checkpoint's tensor a target holds; targets not listed hold all of it."""
        found: dict[str, Cut] = {}
        for name, child in self.children():
            found |= child.cuts(f"{prefix}{name}.")
        return found

    def freeze(self) -> None:
        """Derive what depends on the weights, which are final from here on. Required before the first call."""
        for _, child in self.children():
            child.freeze()

    def pack(self, packer: Packer) -> None:
        """Repack weights for faster matrix products, recursively. Only after `freeze`."""
        for _, child in self.children():
            child.pack(packer)

    def fuse(self, kernels: FusedKernels) -> None:
        """Use these kernels from here on, recursively."""
        self._kernels = kernels
        for _, child in self.children():
            child.fuse(kernels)
