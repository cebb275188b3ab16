"""Where a weight is in a checkpoint's files."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FLOATS = ("BF16", "F16", "F32", "F64")
"""Names of the types that are not quantized."""


class Place(NamedTuple):
    """A tensor in a file."""

    file: Path
    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    """Offset in the file."""
    num_bytes: int
    heads: int | None = None
    """Of a head's rows, which llama.cpp has in another order; see `gguf.in_order`. None: the order is ours."""


class Weight(NamedTuple):
    """The tensors of one weight."""

    whole: Place | None
    """None: it is quantized."""
    parts: Mapping[str, Place]
    """By the last part of their names. Empty unless it is quantized."""

    @property
    def places(self) -> list[Place]:
        return [self.whole] if self.whole is not None else list(self.parts.values())
