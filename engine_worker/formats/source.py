"""The tensors of a checkpoint's files, by the names of the model's weights."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_worker.formats.gguf import BLOCKS, gguf_weights, in_order, read_blocks
from engine_worker.formats.mapped import MappedFile
from engine_worker.formats.readers import PARTS, is_quantized, read
from engine_worker.formats.stored import Stored
from engine_worker.formats.weight import Place, Weight
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.gguf import SUFFIX
from sluice.checkpoint.quantization import Quantization
from sluice.checkpoint.weight_files import tensor_starts, weight_files

IGNORED = (
    "rotary_emb.inv_freq", ".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".output_scale",
    ".k_zero_point", ".v_zero_point", ".q_zero_point", ".output_zero_point",
)  # fmt: skip
"""Ends of names that are no weights: frequencies, which are derived from config.json, and scales of a quantized KV
cache, which this engine's cache does not have."""

LONGEST = max(part.count(".") for part in PARTS) + 1
"""Names in the name of a part."""

Rename = Callable[[str], str | None]
"""Maps the name of a tensor in a file to a weight's name; None: the tensor belongs to another part of the model."""


def same_name(name: str) -> str:
    return name


@contextmanager
def opened(file: Path, device: str = "cpu") -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device=device) as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(f"{file} is broken: {error}") from error


def find_weights(folder: Path, rename: Rename = same_name) -> dict[str, Weight]:
    """All weights by name, from the headers of the files, in the order of the files. Raises CheckpointError."""
    found: dict[str, dict[str, Place]] = {}
    for file in weight_files(folder):
        if file.suffix == SUFFIX:
            named = ((rename(name), weight) for name, weight in gguf_weights(file))
            return {name: weight for name, weight in named if name is not None}
        for place in _places(file):
            weight, part = _split(place.name)
            if (name := rename(weight)) is not None and not place.name.endswith(IGNORED):
                found.setdefault(name, {})[part] = place
    return {name: _weight(parts) for name, parts in found.items()}


def _places(file: Path) -> Iterator[Place]:
    """The tensors of a safetensors file."""
    with opened(file) as tensors:
        starts = tensor_starts(file)
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            # A slice, of which only the header is read.
            header = tensors.get_slice(name)
            kind, shape = header.get_dtype(), tuple(header.get_shape())
            bits = int("".join(filter(str.isdigit, kind.partition("_")[0])) or 8)
            yield Place(file, name, kind, shape, starts[name], math.prod(shape) * bits // 8)


def _split(name: str) -> tuple[str, str]:
    """The name of a tensor -> that of its weight, and which part of it it is."""
    names = name.split(".")
    for count in range(1, min(LONGEST, len(names) - 1) + 1):
        part = ".".join(names[-count:])
        if part in PARTS:
            return f"{'.'.join(names[:-count])}.weight", part
    return name, ""


def _weight(parts: dict[str, Place]) -> Weight:
    quantized = is_quantized({part: place.type for part, place in parts.items()})
    return Weight(None, parts) if quantized else Weight(next(iter(parts.values())), {})


class Files:
    """Reads tensors; each file is opened once. A context manager."""

    def __init__(self, device: str) -> None:
        """`device`: where plain tensors are read to. Quantized ones are decoded on the host."""
        self._device = device
        self._opened: dict[Path, Any] = {}
        self.mapped: dict[Path, MappedFile] = {}
        """Files with quantized matrices that were read: codes may be views of them."""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def plain(self, place: Place, slices: tuple[slice, ...]) -> Tensor:
        """The slices of a tensor, by dimension; () is all of it."""
        if place.file.suffix == SUFFIX:
            return in_order(place, self._mapped(place).tensor(place))[slices]
        whole = self._file(place.file).get_slice(place.name)
        tensor: Tensor = whole[slices or slice(None)]
        return tensor

    def whole(self, name: str, weight: Weight) -> Tensor:
        """A weight as a dense tensor, for weights whose shape is known without the model: plain and GGUF's."""
        if weight.whole is not None:
            return self.plain(weight.whole, ())
        return self.stored(name, weight, weight.parts[BLOCKS].shape, None).decode()

    def stored(self, name: str, weight: Weight, shape: tuple[int, ...], quantization: Quantization | None) -> Stored:
        """The quantized matrix [N, K] called `name`. Raises CheckpointError."""
        if quantization is None and "qweight" in weight.parts:
            raise CheckpointError(f"{name} is quantized, but config.json has no quantization_config to say how")
        if len(shape) != 2:
            raise CheckpointError(f"{name} is quantized, but it is not a matrix: the model needs {list(shape)}")
        if (blocks := weight.parts.get(BLOCKS)) is not None:
            return read_blocks(name, blocks, self._mapped(blocks).bytes_of(blocks), (shape[0], shape[1]))
        parts = {part: self._mapped(place).tensor(place) for part, place in weight.parts.items()}
        try:
            return read(parts, (shape[0], shape[1]), quantization or Quantization(""))
        except CheckpointError as error:
            raise CheckpointError(f"{name.removesuffix('.weight')} {error}") from error

    def _mapped(self, place: Place) -> MappedFile:
        if place.file not in self.mapped:
            self.mapped[place.file] = MappedFile(place.file)
        return self.mapped[place.file]

    def _file(self, file: Path) -> Any:
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(opened(file, self._device))
        return self._opened[file]
