"""LoRA (arXiv:2106.09685) as layers see it: which of their linear maps adapters may change, and what does so in a
step."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engine_worker.layers.layer import Layer
from engine_worker.layers.linear import FusedLinear, SummedLinear
from engine_worker.layers.shard import Span


class Target(NamedTuple):
    """A linear map of the checkpoint that an adapter may change."""

    layer: int
    block: str
    """Its part of the decoder layer, such as "self_attn"."""
    name: str
    """Such as "q_proj"."""
    linear: str
    """The layer that computes it, such as "qkv_proj"."""
    inputs: Span
    """This rank's share, as that of the base weight."""
    outputs: Span
    first: int
    """Index of its first output among those of `linear`."""
    place: int = 0
    """Its index among the model's targets."""

    @property
    def path(self) -> str:
        return f"layers.{self.layer}.{self.block}.{self.name}"


class StepAdapters(Protocol):
    """The adapters of a step's tokens."""

    def add(self, layer: int, linear: str, x: Tensor, out: Tensor) -> None:
        """Add to `out` [T, outputs], in place, what each token's adapter makes of its `x` [T, inputs]."""


class LayerAdapters(NamedTuple):
    """The same for one decoder layer."""

    step: StepAdapters
    layer: int

    def add(self, linear: str, x: Tensor, out: Tensor) -> None:
        self.step.add(self.layer, linear, x, out)


def find_targets(layers: Sequence[Layer]) -> list[Target]:
    """Of a model's decoder layers, in order: the linear maps that adapters may change. Experts are not among them."""
    found = (target for number, layer in enumerate(layers) for target in _targets(number, layer))
    return [target._replace(place=index) for index, target in enumerate(found)]


def _targets(number: int, layer: Layer) -> Iterator[Target]:
    for block, part in layer.children():
        for attribute, linear in part.children():
            if isinstance(linear, FusedLinear):
                first = 0
                for name, outputs in linear.outputs.items():
                    yield Target(number, block, name, attribute, linear.inputs, outputs, first)
                    first += outputs.size
            elif isinstance(linear, SummedLinear):
                yield Target(number, block, attribute, attribute, linear.inputs, linear.outputs, 0)
