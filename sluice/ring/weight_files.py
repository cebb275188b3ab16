"""The safetensors files of a model folder, and whether they are complete."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sluice.ring.checkpoint import CheckpointError
from sluice.ring.other_formats import why_no_weights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LISTED = 5
LENGTH_BYTES = 8
"""A file begins with the length of its header."""
GIT_LFS = b"version https://git-lfs"


def weight_files(folder: Path) -> list[Path]:
    """The files of the folder's index, or the single file. Raises CheckpointError if some are missing."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise CheckpointError(why_no_weights(folder))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of weights: {error!r}") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} has {len(files) - len(missing)} of the {len(files)} weight files of its index; "
            f"missing: {listed(missing)}. Download them again"
        )
    return files


def check_weight_files(folder: Path) -> None:
    """Read the header of each file only. Raises CheckpointError for a missing or truncated file."""
    for file in weight_files(folder):
        _check_file(file)


def _check_file(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(len(GIT_LFS))
        if start == GIT_LFS:
            raise CheckpointError(f"{file} is a pointer of Git LFS and not the weights: run `git lfs pull` there")
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        whole = LENGTH_BYTES + length
        if len(start) < LENGTH_BYTES or whole > size:
            raise CheckpointError(f"{file} ends within its header, after {size} bytes: download it again")
        opened.seek(LENGTH_BYTES)
        whole += _data_bytes(file, opened.read(length))
    if size != whole:
        raise CheckpointError(f"{file} has {size} bytes, by its header {whole}: download it again")


def _data_bytes(file: Path, header: bytes) -> int:
    """Bytes after the header."""
    try:
        tensors: dict[str, Any] = json.loads(header)
        return max((entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{file} has no safetensors header: download it again") from error


def listed(names: Iterable[str]) -> str:
    """The first LISTED names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return ", ".join(ordered[:LISTED]) + more
