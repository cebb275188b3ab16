"""Random quantized matrices in place of a checkpoint's, to measure how fast those of its format are."""

from collections.abc import Collection, Mapping
from typing import NamedTuple, Self

import torch
from torch import Tensor

from engine_worker.formats.stored import PAIRS, Stored
from engine_worker.models.decoder import CausalLM
from engine_worker.runner.weights import Progress, random_deviation, random_weights, whole_shape
from sluice.checkpoint.folder import Checkpoint

GROUP = 128
NAN = 0x7F
"""A code of f8e4m3, without its sign."""


class Format(NamedTuple):
    type: str
    zeros: bool
    spread: float
    """The standard deviation of the codes."""


INTEGERS = Format("u4", True, 4.6)
FORMATS: Mapping[str, Format] = {"awq": INTEGERS, "gptq": INTEGERS, "fp8": Format("f8e4m3", False, 120.0)}
"""By method, with groups of GROUP inputs. Other methods have none: their random weights are dense."""


class RandomCodes:
    """The part of `CheckpointWeights` that layers read from. The projections of all layers are quantized."""

    def __init__(
        self, model: CausalLM, checkpoint: Checkpoint, seed: int, device: torch.device, progress: Progress
    ) -> None:
        """checkpoint: its weights need not exist. They are quantized if it is of one of FORMATS."""
        self._targets = model.targets()
        self._cuts = model.cuts()
        self._format = None if checkpoint.quantization is None else FORMATS.get(checkpoint.quantization.method)
        self._seed = seed
        self._deviation = random_deviation(checkpoint)
        self._progress = progress
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._bytes = 0
        named = (name for name in self._targets if name.endswith("proj.weight"))
        self.quantized = set() if self._format is None else set(named)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def plain(self, name: str) -> Tensor:
        target, cut = self._targets[name], self._cuts.get(name)
        whole = torch.empty(whole_shape(target, cut), dtype=target.dtype, device=self._device)
        whole.normal_(0.0, self._deviation, generator=self._generator)
        return self._counted(whole if cut is None else whole[cut.slices])

    def read(self, name: str) -> Stored:
        form = self._format
        if form is None:
            raise ValueError(f"{name} is not quantized")
        rows, columns = whole_shape(self._targets[name], self._cuts.get(name))
        width = columns // 2 if form.type in PAIRS else columns
        codes = self._counted(self._integers(256, rows, width))
        if form.type == "f8e4m3":
            codes = codes.masked_fill_(codes & NAN == NAN, 0).view(torch.float8_e4m3fn)
        # As precise as in checkpoints.
        scales = self._counted(self._integers(256, rows, -(-columns // GROUP)).bfloat16().add_(256))
        zeros = self._counted(self._integers(3, *scales.shape)) + 7 if form.zeros else None
        values = scales.float() * (self._deviation / form.spread / 384)
        return Stored(form.type, codes, values.bfloat16().float(), None if zeros is None else zeros.float(), GROUP)

    def fill(self, but: Collection[str] = ()) -> None:
        """Fill the other targets."""
        left = {name: target for name, target in self._targets.items() if name not in but}
        random_weights(left, self._seed, self._deviation, lambda *_: None, self._cuts)
        self._bytes += sum(target.nbytes for target in left.values())
        self._progress(self._bytes, self._bytes)

    def _integers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(0, end, shape, generator=self._generator, dtype=torch.uint8, device=self._device)

    def _counted(self, tensor: Tensor) -> Tensor:
        self._bytes += tensor.nbytes
        return tensor
