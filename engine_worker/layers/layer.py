"""The base class of all layers, and the interface of fused kernels.

Layers are plain Python objects with tensors as attributes: the hooks of torch.nn.Module would take a tenth of a small
model's step.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engine_worker.layers.packing import Packer, Product
from engine_worker.layers.shard import Cut


class FusedKernels(NamedTuple):
    """Kernels for the element-wise operations between matrix products, one GPU launch each, and for matrix products of
    a single row.

    At batch size 1 an element-wise operation takes as long as its launch, so fewer launches are faster. A product takes
    as long as reading its weight, which the libraries' kernels, made for more rows, do not read at full speed. Each
    kernel rounds to the model's dtype wherever the torch operations that it replaces do.
    """

    norm: Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
    """(x [T, size], update [T, size] or None, weight [size], eps): adds update to x in place, then returns the RMSNorm
    of x [T, size]."""
    rotate: Callable[[Tensor, tuple[Tensor, Tensor], Tensor | None, float], Tensor]
    """(x [T, heads, head_dim], rotations, weight [heads, head_dim] or None, eps): an RMSNorm per head if there is a
    weight, then the rotation -> [T, heads, head_dim]. The heads of a token must be contiguous."""
    gate: Callable[[Tensor], Tensor]
    """x [T, 2 * size], contiguous, gates before values -> silu(gates) * values, [T, size]."""
    product: Callable[[Tensor, Tensor], Tensor]
    """(x [1, inputs], weight [outputs, inputs], contiguous) -> x Wᵀ, [1, outputs]."""


GroupedProduct = Callable[[Tensor, Tensor], Tensor]
"""(x [S, inputs], rows sorted by expert, ends [experts] int32, where each expert's rows end) -> [S, outputs]."""


class Table(Protocol):
    """The embeddings of a vocabulary, in another form than a dense matrix."""

    @property
    def product(self) -> Product:
        """With the same matrix, for a head that is tied to it."""

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [T] int64 -> [T, hidden], a new tensor."""


class Matrices(Protocol):
    """Reads a checkpoint's matrices in the form in which layers compute with them: dense, or as a function. Names are
    those of `Layer.targets`. Raises CheckpointError."""

    def linear(self, names: Sequence[str], outputs: int, *, biased: bool) -> Tensor | Product:
        """The rows of all matrices in turn, and then zeros, `outputs` rows in all."""

    def table(self, name: str, rows: int) -> Tensor | Table: ...

    def experts(self, names: Sequence[Sequence[str]]) -> Tensor | GroupedProduct:
        """For each expert the rows of its matrices in turn: [experts, outputs, inputs]."""


class Layer:
    """Public tensor attributes are the layer's weights; public attributes that are layers, or lists of layers, are its
    children."""

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
        targets = {
            prefix + name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and not name.startswith("_")
        }
        for name, child in self.children():
            targets |= child.targets(f"{prefix}{name}.")
        return targets

    def cuts(self, prefix: str = "") -> dict[str, Cut]:
        """The slice of the checkpoint's tensor that each target contains; targets not listed contain all of it."""
        cuts: dict[str, Cut] = {}
        for name, child in self.children():
            cuts |= child.cuts(f"{prefix}{name}.")
        return cuts

    def hold(self, matrices: Matrices, prefix: str = "") -> None:
        """Read the layer's matrices, recursively, if it was made in a DeferredPlace. Biases and norms remain to be
        loaded."""
        for name, child in self.children():
            child.hold(matrices, f"{prefix}{name}.")

    def freeze(self) -> None:
        """Call when the weights are final, before the first call: computes tensors that are derived from them."""
        for _, child in self.children():
            child.freeze()

    def pack(self, packer: Packer) -> None:
        """Repack weights for faster matrix products, recursively. Only after `freeze`."""
        for _, child in self.children():
            child.pack(packer)

    def fuse(self, kernels: FusedKernels) -> None:
        """Use these kernels in later calls, recursively."""
        self._kernels = kernels
        for _, child in self.children():
            child.fuse(kernels)
