"""The header of a GGUF file: its metadata, and where its tensors are.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from struct import Struct
from struct import error as StructError
from types import MappingProxyType
from typing import Any, NamedTuple

MAGIC, VERSIONS = b"GGUF", (2, 3)
SUFFIX = ".gguf"
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` for the types of metadata."""
STRING, ARRAY = 8, 9
LENGTH = Struct("<Q")
MAX_DIMENSIONS = 4
TOKENIZER = "tokenizer."
"""Beginning of the names of its metadata."""
ALIGNMENT = 32


class BlockType(NamedTuple):
    """Consecutive values of a row are stored in blocks."""

    name: str
    width: int
    """Values in a block."""
    num_bytes: int


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}
"""The types that are supported, by their number in the file."""
OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Names for error messages."""


class GgufError(ValueError):
    """The file cannot be used. The message continues its name."""


class GgufTensor(NamedTuple):
    name: str
    type: str
    shape: tuple[int, ...]
    """Rows first, as in torch."""
    start: int
    """Offset in the file."""
    num_bytes: int


class Gguf(NamedTuple):
    fields: Mapping[str, Any]
    """Numbers, strings, and lists of them."""
    tensors: tuple[GgufTensor, ...]
    header_bytes: int


def read_gguf(file: Path) -> Gguf:
    """Raises GgufError if the file is broken, incomplete, or has tensors of a type that is not supported."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).read()
    except (StructError, IndexError, OverflowError, MemoryError) as error:
        raise GgufError("ends within its header: download it again") from error
    except UnicodeDecodeError as error:
        raise GgufError(f"has a text that is not UTF-8: {error}") from error
    except GgufError:
        raise
    except ValueError as error:
        # An empty file cannot be mapped.
        raise GgufError("is not a GGUF file") from error


def read_header(file: Path) -> Gguf:
    """All but the metadata of the tokenizer, which loading does not need: it has hundreds of thousands of texts. Parsed
    once while the file stays the same. Raises as `read_gguf`."""
    status = file.stat()
    return _parsed(file.resolve(), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _parsed(file: Path, _size: int, _changed_ns: int) -> Gguf:
    gguf = read_gguf(file)
    others = {name: value for name, value in gguf.fields.items() if not name.startswith(TOKENIZER)}
    return gguf._replace(fields=MappingProxyType(others))


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> Gguf:
        if self._data[: len(MAGIC)] != MAGIC:
            raise GgufError("is not a GGUF file")
        self._at = len(MAGIC)
        version, num_tensors, num_fields = self._take(Struct("<IQQ"))
        if version not in VERSIONS:
            raise GgufError(f"has version {version} of GGUF; supported: {' and '.join(map(str, VERSIONS))}")
        fields = {}
        for _ in range(num_fields):
            name = self._text()
            fields[name] = self._value(*self._take(Struct("<I")))
        if (parts := fields.get("split.count", 0)) > 1:
            raise GgufError(f"is one of {parts} parts: join them with `llama-gguf-split --merge`")
        found = [self._tensor() for _ in range(num_tensors)]
        names = Counter(tensor.name for tensor in found)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise GgufError(f"has {names[repeated[0]]} tensors of the name {repeated[0]}")
        alignment = fields.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"has an invalid general.alignment, {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = tuple(tensor._replace(start=start + tensor.start) for tensor in found)
        for tensor in tensors:
            if tensor.start + tensor.num_bytes > len(self._data):
                raise GgufError(f"ends within the tensor {tensor.name}: download it again")
        return Gguf(MappingProxyType(fields), tensors, self._at)

    def _tensor(self) -> GgufTensor:
        """With its start relative to that of all tensors."""
        name = self._text()
        (dimensions,) = self._take(Struct("<I"))
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise GgufError(f"has a tensor {name} of {dimensions} dimensions")
        shape = tuple(reversed(self._take(Struct(f"<{dimensions}Q"))))
        if not all(shape):
            raise GgufError(f"has a tensor {name} of shape {list(shape)}, which has no values")
        number, start = self._take(Struct("<IQ"))
        kind = TYPES.get(number)
        if kind is None:
            unknown = OTHER_TYPES.get(number, f"number {number}")
            raise GgufError(
                f"has a tensor {name} of type {unknown}, which is not supported; use a file with tensors of the types "
                f"{', '.join(each.name for each in TYPES.values())}"
            )
        if shape[-1] % kind.width:
            raise GgufError(f"has a tensor {name} with rows of {shape[-1]} values, but {kind.name} has {kind.width}")
        return GgufTensor(name, kind.name, shape, start, math.prod(shape) // kind.width * kind.num_bytes)

    def _take(self, layout: Struct) -> tuple[Any, ...]:
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def _text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> list[str]:
        # A vocabulary has hundreds of thousands: local variables halve the time.
        data, at, end, unpack = self._data, self._at, len(self._data), LENGTH.unpack_from
        found = []
        for _ in range(count):
            start = at + LENGTH.size
            at = start + unpack(data, at)[0]
            if at > end:
                raise IndexError
            found.append(data[start:at].decode())
        self._at = at
        return found

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            inner, count = self._take(Struct("<IQ"))
            if inner == STRING:
                return self._texts(count)
            if count > len(self._data):
                raise IndexError
            return list(self._take(Struct(f"<{count}{self._format(inner)}")))
        return self._take(Struct("<" + self._format(kind)))[0]

    @staticmethod
    def _format(kind: int) -> str:
        if kind not in NUMBERS:
            raise GgufError(f"has metadata of type {kind}, which is unknown")
        return NUMBERS[kind]
