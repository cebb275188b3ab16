"""Opens safetensors files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sluice.checkpoint.folder import CheckpointError

Rename = Callable[[str], str | None]
"""Maps the name of a tensor in a file to a target's name; None: the tensor belongs to another part of the model."""


@contextmanager
def opened(file: Path, device: str = "cpu") -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device=device) as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(f"{file} is broken: {error}") from error
