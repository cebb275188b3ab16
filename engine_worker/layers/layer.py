"""What all layers are: plain objects that hold tensors.

Calling one is calling a Python method. torch's Module would spend a tenth of a small model's step on its hooks.
"""

from collections.abc import Iterator

from torch import Tensor

from engine_worker.layers.fusion import Kernels
from engine_worker.layers.packing import Packer
from engine_worker.layers.shard import Cut


class Layer:
    """Its weights are its public attributes that are tensors; its parts are its public attributes that are layers."""

    _kernels: Kernels | None = None

    def parts(self) -> Iterator[tuple[str, "Layer"]]:
        """Layers that this one is made of, with their names; of a list, with their numbers."""
        for name, value in vars(self).items():
            if isinstance(value, Layer):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}.{i}", part) for i, part in enumerate(value))

    def targets(self, prefix: str = "") -> dict[str, Tensor]:
        """Where each tensor of a checkpoint goes, by its name there: views to be filled before `freeze`."""
        found = {
            prefix + name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and not name.startswith("_")
        }
        for name, part in self.parts():
            found |= part.targets(f"{prefix}{name}.")
        return found

    def cuts(self, prefix: str = "") -> dict[str, Cut]:
        """Which part of the checkpoint's tensor a target is, where it is not all of it."""
        found: dict[str, Cut] = {}
        for name, part in self.parts():
            found |= part.cuts(f"{prefix}{name}.")
        return found

    def freeze(self) -> None:
        """The weights are final: derive from them what is needed. Comes before the first call."""
        for _, part in self.parts():
            part.freeze()

    def pack(self, packer: Packer) -> None:
        """Pack the weights that are better packed, here and in all parts. Comes after `freeze`."""
        for _, part in self.parts():
            part.pack(packer)

    def fuse(self, kernels: Kernels) -> None:
        """Compute by these what they can, here and in all parts."""
        self._kernels = kernels
        for _, part in self.parts():
            part.fuse(kernels)
