"""The files with a checkpoint's weights: which they are, whether they are complete, and where their tensors are."""

import json
from pathlib import Path
from typing import NamedTuple

import msgspec

from sluice.checkpoint.errors import CheckpointError, listed
from sluice.checkpoint.gguf import SUFFIX, GgufError, read_header
from sluice.checkpoint.other_formats import why_no_weights
from sluice.checkpoint.tensor_file import LENGTH_BYTES

MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors for a header."""
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GGUF = "model.gguf"
"""A folder with this file and without safetensors is a converted GGUF file."""
GIT_LFS = b"version https://git-lfs"


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int] | None = None
    """Start and end, relative to the end of the header. None for the metadata entry."""


class Layout(NamedTuple):
    header: bytes
    tensors: list[tuple[int, int]]
    """Start and end of each tensor in the file. If the header is malformed, which loading will report, start and end of
    the whole file."""


def weight_files(folder: Path) -> list[Path]:
    """The files of the folder's index, or the single file. Raises CheckpointError if some are missing."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        if (folder / GGUF).is_file():
            return [folder / GGUF]
        raise CheckpointError(why_no_weights(folder))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / name for name in names]
        outside = next((name for name in names if name in ("", "..") or Path(name).name != name), None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of weight files: {error!r:.200}") from error
    if outside is not None:
        raise CheckpointError(f"{index}: weight_map names {outside[:80]!r}, which is not the name of a file beside it")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} has {len(files) - len(missing)} of the {len(files)} weight files of its index; "
            f"missing: {listed(missing)}. Download them again"
        )
    return files


def layout_of(file: Path) -> Layout:
    return _gguf_layout(file) if file.suffix == SUFFIX else _safetensors_layout(file)


def _gguf_layout(file: Path) -> Layout:
    try:
        gguf = read_header(file)
    except GgufError:
        return Layout(b"", [(0, file.stat().st_size)])
    with file.open("rb") as opened:
        header = opened.read(gguf.header_bytes)
    return Layout(header, [(tensor.start, tensor.start + tensor.num_bytes) for tensor in gguf.tensors])


def _safetensors_layout(file: Path) -> Layout:
    size = file.stat().st_size
    prefix, header = _header(file)
    start = len(prefix) + len(header)
    try:
        ranges = [(start + begin, start + end) for begin, end in _data_offsets(header).values()]
    except ValueError:
        ranges = []
    valid = ranges and all(start <= begin <= end <= size for begin, end in ranges)
    return Layout(prefix + header, ranges if valid else [(0, size)])


def _data_offsets(header: bytes) -> dict[str, tuple[int, int]]:
    """`data_offsets` of each tensor. Raises ValueError if the header is malformed."""
    entries = msgspec.json.decode(header, type=dict[str, _Tensor])
    return {name: entry.data_offsets for name, entry in entries.items() if entry.data_offsets is not None}


def tensor_starts(file: Path) -> dict[str, int]:
    """Where each tensor of a safetensors file begins. Raises ValueError if its header is malformed."""
    prefix, header = _header(file)
    return {name: len(prefix) + len(header) + begin for name, (begin, _) in _data_offsets(header).items()}


def _header(file: Path) -> tuple[bytes, bytes]:
    """The header of a safetensors file, and its length before it. A header that is too long, which is reported when the
    file is checked, is left out."""
    with file.open("rb") as opened:
        prefix = opened.read(LENGTH_BYTES)
        length = int.from_bytes(prefix, "little")
        return prefix, opened.read(length) if length <= MAX_HEADER_BYTES else b""


def check_weight_files(folder: Path) -> None:
    """Raises CheckpointError if a weight file is missing or truncated. Reads only the headers."""
    for file in weight_files(folder):
        if file.suffix == SUFFIX:
            _check_gguf(file)
        else:
            _check_safetensors(file)


def _check_gguf(file: Path) -> None:
    try:
        read_header(file)
    except GgufError as error:
        raise CheckpointError(f"{file} {error}") from error


def _check_safetensors(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(len(GIT_LFS))
        if start == GIT_LFS:
            raise CheckpointError(f"{file} is a Git LFS pointer instead of weights: run `git lfs pull` in its folder")
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        expected = LENGTH_BYTES + length
        if MAX_HEADER_BYTES < length <= size:
            raise CheckpointError(f"{file} has a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed")
        if len(start) < LENGTH_BYTES or expected > size:
            raise CheckpointError(f"{file} ends within its header, after {size} bytes: download it again")
        opened.seek(LENGTH_BYTES)
        expected += _data_bytes(file, opened.read(length))
    if size != expected:
        raise CheckpointError(f"{file} has {size} bytes instead of {expected} as its header says: download it again")


def _data_bytes(file: Path, header: bytes) -> int:
    """Size of the tensors' data. Raises CheckpointError if the header is malformed."""
    try:
        return max((end for _, end in _data_offsets(header).values()), default=0)
    except ValueError as error:
        raise CheckpointError(f"{file} has no valid safetensors header: download it again") from error
