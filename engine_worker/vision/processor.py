"""Reads a checkpoint's image processor with transformers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoImageProcessor

from sluice.checkpoint.folder import CheckpointError

T = TypeVar("T")


def read_processor(folder: Path) -> Any:
    """The processor that converts images to the pixels that the model was trained on. Raises CheckpointError."""
    # Not the torchvision backend, whose versions resize differently.
    processors: Any = AutoImageProcessor
    return read_by(folder, partial(processors.from_pretrained, backend="pil"))


def read_by(folder: Path, read: Callable[..., T]) -> T:
    """Call a `from_pretrained` of transformers. Raises CheckpointError."""
    try:
        return read(folder, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"transformers cannot read the image processing of {folder}: {error}") from error
