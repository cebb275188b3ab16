"""Sparse mixture of experts: a router picks a few experts per token (arXiv:1701.06538)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.layers.adapters import LayerAdapters
from engine_worker.layers.layer import GroupedProduct, Layer, Matrices
from engine_worker.layers.linear import Linear
from engine_worker.layers.mlp import silu_and_mul
from engine_worker.layers.shard import Cut, Place

ALIGNED = 8
"""Half-precision numbers in 16 bytes: the grouped matrix product needs rows of a multiple of that size."""


def waits_for_device(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's grouped product reads the group sizes on the host, which rules out CUDA graphs.

    In bfloat16 on compute capability 9 and 10 the product is a single kernel; otherwise torch loops over the groups.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return True
    return torch.cuda.get_device_capability(device)[0] not in (9, 10)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    num_experts: int
    num_chosen: int
    """Experts per token."""
    intermediate_size: int
    normalized: bool
    """Whether the router's weights of a token's experts are scaled so that their sum is 1."""


class GroupedLinear(Layer):
    """A linear map of each expert."""

    def __init__(self, count: int, outputs: int, inputs: int, place: Place) -> None:
        self.weight = place.matrix(count, outputs, inputs)
        self._product: GroupedProduct | None = None

    def keep(self, form: Tensor | GroupedProduct) -> None:
        """Compute with these weights, or this product, from now on."""
        if isinstance(form, Tensor):
            self.weight = form
        else:
            self._product = form
            del self.weight

    @property
    def weights(self) -> Sequence[Tensor]:
        """[outputs, inputs] of each expert; none if there is a product instead."""
        return self.weight.unbind() if self._product is None else ()

    @property
    def waits_for_device(self) -> bool:
        return self._product is None and waits_for_device(self.weight.dtype, self.weight.device)

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """See `GroupedProduct`."""
        if self._product is not None:
            return self._product(x, ends)
        return F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)


class Experts(Layer):
    """`num_experts` SwiGLUs without biases. Each rank has a slice of every expert and computes a partial sum."""

    def __init__(self, hidden_size: int, shape: ExpertShape, place: Place) -> None:
        self._span = place.shard.span(shape.intermediate_size, "moe_intermediate_size")
        self._count, size = shape.num_experts, self._span.size
        if size % ALIGNED:
            raise ValueError(
                f"tensor_parallel = {place.shard.size}: each rank's share of moe_intermediate_size = "
                f"{shape.intermediate_size} must be a multiple of {ALIGNED}"
            )
        self.gate_up_proj = GroupedLinear(self._count, 2 * size, hidden_size, place)
        self.down_proj = GroupedLinear(self._count, hidden_size, size, place)

    @property
    def waits_for_device(self) -> bool:
        return self.gate_up_proj.waits_for_device or self.down_proj.waits_for_device

    def targets(self, prefix: str = "") -> dict[str, Tensor]:
        """See `Layer.targets`. Checkpoints store the three projections of each expert separately."""
        targets = {}
        for i, gate_up in enumerate(self.gate_up_proj.weights):
            for name, weight in zip(("gate_proj", "up_proj"), gate_up.chunk(2), strict=True):
                targets[f"{prefix}{i}.{name}.weight"] = weight
        for i, down in enumerate(self.down_proj.weights):
            targets[f"{prefix}{i}.down_proj.weight"] = down
        return targets

    def cuts(self, prefix: str = "") -> dict[str, Cut]:
        dims = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}
        return {
            f"{prefix}{i}.{name}.weight": Cut(dim, self._span) for i in range(self._count) for name, dim in dims.items()
        }

    def hold(self, matrices: Matrices, prefix: str = "") -> None:
        for layer, names in ((self.gate_up_proj, ("gate_proj", "up_proj")), (self.down_proj, ("down_proj",))):
            each = [[f"{prefix}{i}.{name}.weight" for name in names] for i in range(self._count)]
            layer.keep(matrices.experts(each))

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [S, hidden], rows sorted by expert; ends [num_experts] int32, where each expert's rows end -> [S, hidden].

        Each projection is one grouped product over all experts."""
        gate_up = self.gate_up_proj(x, ends)
        gated = silu_and_mul(gate_up) if self._kernels is None else self._kernels.gate(gate_up)
        return self.down_proj(gated, ends)


class SparseMoE(Layer):
    """The weighted sum of the experts with the highest router probabilities: [T, hidden] -> [T, hidden]."""

    def __init__(self, hidden_size: int, shape: ExpertShape, place: Place) -> None:
        """Raises ValueError if the ranks cannot share the experts' intermediate size."""
        self.gate = Linear(hidden_size, shape.num_experts, place)
        self.experts = Experts(hidden_size, shape, place)
        self._shard = place.shard
        self._shape = shape
        self._numbers = torch.arange(shape.num_experts, device=place.device)

    def __call__(self, x: Tensor, adapters: LayerAdapters | None = None) -> Tensor:  # noqa: ARG002 - none for experts
        weights, chosen = self._choose(x)
        # Sort the (token, expert) pairs by expert: the grouped product needs each expert's rows to be adjacent.
        experts, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, self._numbers, right=True, out_int32=True)
        sorted_rows = self.experts(x.index_select(0, order // self._shape.num_chosen), ends)
        rows = torch.empty_like(sorted_rows).index_copy_(0, order, sorted_rows)
        return self._shard.all_reduce(
            torch.einsum("tkh,tk->th", rows.view(len(x), self._shape.num_chosen, -1), weights)
        )

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> weights and indices of each token's experts, both [T, num_chosen]."""
        probabilities = torch.softmax(self.gate(x), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(probabilities, self._shape.num_chosen, dim=-1)
        if self._shape.normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen
