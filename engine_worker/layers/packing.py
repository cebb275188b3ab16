"""Packs weights once, when the model is loaded, into the layout of a CPU library's matrix product.

A plain product repacks its weight in every call, which at 4 to 32 rows can cost more than the product itself.

A product is batch invariant if a row's result has the same bits in every batch. That depends on the library, the CPU,
the number of threads and the weight's shape: MKL's product is batch invariant on Intel, but on AMD it computes batches
of 1 to 3 rows differently. So each library is tested on this machine, for each shape of weight.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor | None], Tensor]
"""(x [T, inputs], bias [outputs] or None) -> [T, outputs]."""

TUNED_ROWS = 16
"""Number of rows for which the libraries optimize the layout; the product accepts any number."""
ONEDNN_ROWS = 2
"""From this number of rows on, oneDNN's order of summation depends only on the weight; for a single row it may choose
another kernel."""
TESTED_ROWS = 512
"""Rows of the largest tested batch."""
TESTED_BATCHES = (*range(1, 18), 24, 33, 64, 100, 257)
"""Rows of the smaller batches that are compared with it."""
TESTED_OUTPUTS = 2048
"""Maximum number of outputs to test. Fewer than the weight's are enough: the order of a sum depends on the number of
inputs."""


class Library(NamedTuple):
    """A float32 implementation of x Wᵀ + b on a CPU."""

    name: str
    exists: Callable[[], bool]
    """Whether this build of torch includes it."""
    pack: Callable[[Tensor], Product]
    """Packs a weight [outputs, inputs]; the caller may then free it."""


class LibraryChoice(NamedTuple):
    """The library for weights of one shape."""

    library: Library
    invariant: bool


def pack_mkl(weight: Tensor) -> Product:
    """MKL's cblas_sgemm_pack and cblas_sgemm_compute."""
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, TUNED_ROWS)
    # Of the plain weight the operation reads only the shape, so an expanded scalar will do.
    shape = torch.empty(1).expand(weight.shape)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkl._mkl_linear.default(x, packed, shape, bias, x.shape[0])

    return product


def pack_onednn(weight: Tensor) -> Product:
    """oneDNN's inner product, padded to at least `ONEDNN_ROWS` rows."""
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
    """Packs each weight with the first library that is batch invariant for its shape, or with the first library if none
    is."""

    def __init__(self, libraries: Sequence[Library] = LIBRARIES) -> None:
        self._libraries = [library for library in libraries if library.exists()]
        self._choices: dict[torch.Size, LibraryChoice] = {}
        """Choice by the shape of the tested part of the weight."""

    @property
    def invariant(self) -> bool:
        """Whether the products of all packed weights are batch invariant; False if none was packed, since it is then
        unknown."""
        return bool(self._choices) and all(choice.invariant for choice in self._choices.values())

    @property
    def summary(self) -> str:
        if not self._choices:
            return "not packed"
        names = dict.fromkeys(choice.library.name for choice in self._choices.values())
        return f"{' and '.join(names)}, {'' if self.invariant else 'not '}batch invariant"

    def pack(self, weight: Tensor) -> Product | None:
        """The product with a final weight [outputs, inputs]. None in half precision and on a GPU, which have no packed
        product."""
        if weight.dtype != torch.float32 or weight.device.type != "cpu" or not self._libraries:
            return None
        part = weight[:TESTED_OUTPUTS]
        if part.shape not in self._choices:
            self._choices[part.shape] = self._choose(part)
        return self._choices[part.shape].library.pack(weight)

    def _choose(self, weight: Tensor) -> LibraryChoice:
        for library in self._libraries:
            if is_batch_invariant(library.pack(weight), weight.shape[1]):
                return LibraryChoice(library, True)
        return LibraryChoice(self._libraries[0], False)


def is_batch_invariant(product: Product, inputs: int) -> bool:
    """Whether rows have the same bits in the whole batch and in smaller batches."""
    # The smaller batches are the last rows of the whole batch, so that a row's offset in the batch differs too.
    x = torch.randn(TESTED_ROWS, inputs, generator=torch.Generator().manual_seed(0))
    whole = product(x, None)
    return all(torch.equal(product(x[-rows:], None), whole[-rows:]) for rows in TESTED_BATCHES)
