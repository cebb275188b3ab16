"""LoRA (arXiv:2106.09685) in layers: the linear maps that adapters may change, and the interface by which a step's
adapters change their outputs."""

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
    """The part of the decoder layer that contains the map, such as "self_attn"."""
    name: str
    """The map's name in the checkpoint, such as "q_proj"."""
    linear: str
    """The layer that computes the map, such as "qkv_proj"."""
    inputs: Span
    """This rank's share of the inputs, like that of the base weight."""
    outputs: Span
    """This rank's share of the outputs."""
    first: int
    """Index of the map's first output among the outputs of `linear`."""
    place: int = 0
    """Index of this target among the model's targets."""

    @property
    def path(self) -> str:
        return f"layers.{self.layer}.{self.block}.{self.name}"


class StepAdapters(Protocol):
    """The adapters of a step's tokens."""

    def add(self, layer: int, linear: str, x: Tensor, out: Tensor) -> None:
        """For each token with an adapter, add the adapter's output for `x` [T, inputs] to `out` [T, outputs], in
        place."""


class LayerAdapters(NamedTuple):
    """The adapters of a step's tokens in one decoder layer."""

    step: StepAdapters
    layer: int

    def add(self, linear: str, x: Tensor, out: Tensor) -> None:
        self.step.add(self.layer, linear, x, out)


def find_targets(layers: Sequence[Layer]) -> list[Target]:
    """The linear maps of a model's decoder layers, in order, that adapters may change. Experts are not among them."""
    targets = (target for number, layer in enumerate(layers) for target in _targets(number, layer))
    return [target._replace(place=index) for index, target in enumerate(targets)]


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
