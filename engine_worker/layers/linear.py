"""Linear maps."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.layers.layer import Layer
from engine_worker.layers.packing import Packer, Product
from engine_worker.layers.shard import ALONE, Cut, Part, Shard


class Linear(Layer):
    """y = x Wᵀ + b."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        self.bias = torch.empty(outputs, dtype=dtype, device=device) if bias else None
        self._product: Product | None = None

    def pack(self, packer: Packer) -> None:
        """See Layer. Where the weight is packed the plain one is given up."""
        self._product = packer.pack(self.weight)
        if self._product is not None:
            del self.weight

    def __call__(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        if self._product is None:
            return F.linear(x, self.weight, self.bias)
        return self._product(x, self.bias)


class FusedLinear(Linear):
    """Several linear maps of the same input as one: their outputs, or this rank's parts of them, side by side."""

    def __init__(
        self, inputs: int, outputs: dict[str, Part], *, bias: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(inputs, sum(part.size for part in outputs.values()), bias=bias, dtype=dtype, device=device)
        self.outputs = outputs
        """Name of each map, beside this one's, and its outputs."""

    def targets(self, prefix: str = "") -> dict[str, Tensor]:
        """See Layer."""
        beside = prefix.removesuffix(".").rpartition(".")[0]
        found: dict[str, Tensor] = {}
        for name, fused in super().targets().items():
            rows = fused.split([part.size for part in self.outputs.values()])
            found |= {f"{beside}.{each}.{name}": view for each, view in zip(self.outputs, rows, strict=True)}
        return found

    def cuts(self, prefix: str = "") -> dict[str, Cut]:
        """See Layer."""
        beside = prefix.removesuffix(".").rpartition(".")[0]
        names = super().targets()
        return {f"{beside}.{each}.{name}": Cut(0, part) for each, part in self.outputs.items() for name in names}


class SummedLinear(Linear):
    """A linear map of which each rank has some inputs; the ranks' products are summed."""

    def __init__(
        self,
        inputs: Part,
        outputs: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
    ) -> None:
        super().__init__(inputs.size, outputs, bias=bias, dtype=dtype, device=device)
        self._inputs = inputs
        self._shard = shard

    def cuts(self, prefix: str = "") -> dict[str, Cut]:
        """See Layer."""
        return {f"{prefix}weight": Cut(1, self._inputs)}

    def freeze(self) -> None:
        """See Layer. One rank adds the bias, and so the sum has it once."""
        super().freeze()
        if self._shard.rank:
            self.bias = None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, this rank's inputs] -> [T, outputs]."""
        return self._shard.reduce(super().__call__(x))
