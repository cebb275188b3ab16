"""Weights packed once into the layout of a library's matrix product, and which library each weight gets.

A plain product packs its weight anew on every call, which at 4 to 32 rows can cost more than the product itself.
Whether a product is batch invariant, so that a row has the same bits in every batch, depends on the CPU, the number of
threads and the weight's shape: MKL's is on Intel, but on AMD it treats batches of 1 to 3 rows in a way of their own. So
it is tried out.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor | None], Tensor]
"""(x [T, inputs], bias [outputs] or None) -> [T, outputs]."""

TUNED_ROWS = 16
"""Rows that libraries choose their layout for. A product serves any number."""
ONEDNN_ROWS = 2
"""From so many rows on oneDNN's order of summation depends on the weight alone; a single row can get another kernel."""
TRIED_ROWS = 512
TRIED_BATCHES = (*range(1, 18), 24, 33, 64, 100, 257)
TRIED_OUTPUTS = 2048
"""Of a weight at most. What a sum's order depends on is the number of its terms, the inputs."""


class Library(NamedTuple):
    """A way to compute x Wᵀ + b in float32 on a CPU."""

    name: str
    exists: Callable[[], bool]
    """Whether this build of torch has it."""
    pack: Callable[[Tensor], Product]
    """A weight [outputs, inputs], which is not needed any more afterwards."""


class Choice(NamedTuple):
    """Of a library for weights of a shape."""

    library: Library
    invariant: bool


def pack_mkl(weight: Tensor) -> Product:
    """cblas_sgemm_pack and cblas_sgemm_compute."""
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, TUNED_ROWS)
    # Beside a packed weight the op reads only the sizes of the plain one.
    shape = torch.empty(1).expand(weight.shape)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkl._mkl_linear.default(x, packed, shape, bias, x.shape[0])

    return product


def pack_onednn(weight: Tensor) -> Product:
    """oneDNN's inner product, with `ONEDNN_ROWS` rows at least."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, TUNED_ROWS)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        if rows < ONEDNN_ROWS:
            x = F.pad(x, (0, 0, 0, ONEDNN_ROWS - rows))
        return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")[:rows]

    return product


MKL = Library("MKL", lambda: torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear"), pack_mkl)
ONEDNN = Library(
    "oneDNN",
    lambda: torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    pack_onednn,
)
LIBRARIES = (MKL, ONEDNN)


class Packer:
    """Packs weights, each by the first library whose product is batch invariant for its shape, or else by the first."""

    def __init__(self, libraries: Sequence[Library] = LIBRARIES) -> None:
        self._libraries = [library for library in libraries if library.exists()]
        self._choices: dict[torch.Size, Choice] = {}
        """By the shape that was tried out."""

    @property
    def invariant(self) -> bool:
        """Whether all products of packed weights are. Without any it is unknown, and so it is not claimed."""
        return bool(self._choices) and all(choice.invariant for choice in self._choices.values())

    @property
    def summary(self) -> str:
        """For the log."""
        if not self._choices:
            return "not packed"
        names = dict.fromkeys(choice.library.name for choice in self._choices.values())
        return f"{' and '.join(names)}, {'' if self.invariant else 'not '}batch invariant"

    def pack(self, weight: Tensor) -> Product | None:
        """[outputs, inputs], final; None where it is better left as it is: in half precision, or on a GPU."""
        if weight.dtype != torch.float32 or weight.device.type != "cpu" or not self._libraries:
            return None
        part = weight[:TRIED_OUTPUTS]
        if part.shape not in self._choices:
            self._choices[part.shape] = self._choose(part)
        return self._choices[part.shape].library.pack(weight)

    def _choose(self, weight: Tensor) -> Choice:
        for library in self._libraries:
            if is_batch_invariant(library.pack(weight), weight.shape[1]):
                return Choice(library, True)
        return Choice(self._libraries[0], False)


def is_batch_invariant(product: Product, inputs: int) -> bool:
    """Tried out: whether rows have the same bits in smaller batches, where they also have other places."""
    x = torch.randn(TRIED_ROWS, inputs, generator=torch.Generator().manual_seed(0))
    whole = product(x, None)
    return all(torch.equal(product(x[-rows:], None), whole[-rows:]) for rows in TRIED_BATCHES)
