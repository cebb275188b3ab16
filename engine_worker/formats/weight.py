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
    num_bytes: int
    matrix: int | None = None
    """Which one, in a tensor with a matrix for each expert."""


class Weight(NamedTuple):
    """The tensors of one weight."""

    whole: Place | None
    """None: it is quantized."""
    parts: Mapping[str, Place]
    """By the last part of their names. Empty unless it is quantized."""

    @property
    def places(self) -> list[Place]:
        return [self.whole] if self.whole is not None else list(self.parts.values())
