"""What transformers reads from a checkpoint about its images."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoImageProcessor

from sluice.ring.checkpoint import CheckpointError

T = TypeVar("T")


def read_processor(folder: Path) -> Any:
    """What reads pixels as the checkpoint was trained on. Raises CheckpointError."""
    # torchvision's versions differ in their resizing.
    processors: Any = AutoImageProcessor
    return read_by(folder, partial(processors.from_pretrained, backend="pil"))


def read_by(folder: Path, read: Callable[..., T]) -> T:
    """By a `from_pretrained` of transformers. Raises CheckpointError."""
    try:
        return read(folder, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"transformers cannot read how {folder} takes images: {error}") from error
