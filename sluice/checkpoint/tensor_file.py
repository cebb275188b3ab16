"""Parses the header of a safetensors file in memory, for readers without the package safetensors.

Format: https://huggingface.co/docs/safetensors#format
"""

from typing import NamedTuple, TypeVar

import msgspec

LENGTH_BYTES = 8
"""Size of the integer at the start of the file, which is the length of the header."""
METADATA = "__metadata__"
INVALID_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


class TensorFileError(ValueError):
    """Not a safetensors file, or a tensor that its reader does not support. The message continues the file's name."""


class TensorFile(NamedTuple):
    entries: dict[str, msgspec.Raw]
    """The JSON of the header's entry for each tensor."""
    start: int
    """Offset of the tensors' data in the file."""


def split(data: bytes | memoryview, max_header_bytes: int) -> TensorFile:
    """Parse the header. Raises TensorFileError."""
    size = int.from_bytes(data[:LENGTH_BYTES], "little")
    start = LENGTH_BYTES + size
    if len(data) < LENGTH_BYTES or size > max_header_bytes or start > len(data):
        raise TensorFileError(f"is not a safetensors file: its header has an invalid length, {size} bytes")
    entries = decode(bytes(data[LENGTH_BYTES:start]), dict[str, msgspec.Raw])
    entries.pop(METADATA, None)
    return TensorFile(entries, start)


def decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decode a part of the header. `kind`: a type with the bounds of the reader. Raises TensorFileError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except INVALID_JSON as error:
        raise TensorFileError(f"is not a safetensors file: {error}") from error
