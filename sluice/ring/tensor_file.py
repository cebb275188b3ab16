"""A safetensors file in memory -> what its header says of each tensor, for readers without the package of that name.

Format: https://huggingface.co/docs/safetensors#format
"""

from typing import NamedTuple, TypeVar

import msgspec

LENGTH_BYTES = 8
METADATA = "__metadata__"
INVALID_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


class TensorFileError(ValueError):
    """Not such a file, or a tensor that its reader does not support. The message continues the file's name."""


class TensorFile(NamedTuple):
    entries: dict[str, msgspec.Raw]
    """By tensor."""
    start: int
    """Of the tensors' bytes in the file."""


def split(data: bytes | memoryview, max_header_bytes: int) -> TensorFile:
    """Raises TensorFileError."""
    size = int.from_bytes(data[:LENGTH_BYTES], "little")
    start = LENGTH_BYTES + size
    if len(data) < LENGTH_BYTES or size > max_header_bytes or start > len(data):
        raise TensorFileError(f"is not a safetensors file: its header is said to have {size} bytes")
    entries = decode(bytes(data[LENGTH_BYTES:start]), dict[str, msgspec.Raw])
    entries.pop(METADATA, None)
    return TensorFile(entries, start)


def decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """A part of the header; `kind`: with the bounds of the reader. Raises TensorFileError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except INVALID_JSON as error:
        raise TensorFileError(f"is not a safetensors file: {error}") from error
