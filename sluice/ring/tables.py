"""Prompt tables on the ring: rows of embeddings that stand in a prompt where tokens would.

A prompt's ids from the size of the vocabulary on address the rows of all its tables, joined: vocab_size + i is row i,
as in TensorRT-LLM's PromptTuningConfig. An image is a table whose rows the engine computes; images come after tables.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import accumulate
from math import prod
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from sluice.ring.images import DIGEST_BYTES, MAX_IMAGE_BYTES, MAX_IMAGES, Digest, Image, Size
from sluice.ring.message import Number

MAX_TABLES = 16
"""In a request."""
MAX_TABLE_BYTES = 8 << 20
"""Of all tables of a request: less than a frame of a lane, or a message of gRPC, may have."""

FloatType = Literal["float32", "float16", "bfloat16"]
FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class Table(msgspec.Struct, frozen=True, array_like=True):
    """Rows of embeddings, as the first layer gets those of tokens."""

    digest: Digest
    """Of everything below: what block hashes cover."""
    rows: Size
    hidden_size: Size
    dtype: FloatType
    data: memoryview
    """[rows, hidden_size], row-major, little-endian."""

    def __post_init__(self) -> None:
        size = prod((self.rows, self.hidden_size, FLOAT_BYTES[self.dtype]))
        if len(self.data) != size:
            raise ValueError(f"{len(self.data)} bytes of {self.dtype} for {self.rows} rows of {self.hidden_size}")

    @staticmethod
    def of(rows: int, hidden_size: int, dtype: FloatType, data: bytes | memoryview) -> "Table":
        """Takes a millisecond per megabyte, for the digest. Raises ValueError if sizes and data do not fit together."""
        return Table(_digest(rows, hidden_size, dtype, data), rows, hidden_size, dtype, memoryview(data))

    @property
    def intact(self) -> bool:
        """Whether the digest is that of the rows; it takes as long as `of`."""
        return self.digest == _digest(self.rows, self.hidden_size, self.dtype, self.data)


class PromptTables(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tables and images of a request."""

    tables: Annotated[tuple[Table, ...], Meta(max_length=MAX_TABLES)] = ()
    extra_ids: tuple[Number, ...] = ()
    """One per token of the prompt, or none: numbers that the caller wants block hashes to cover too."""
    images: Annotated[tuple[Image, ...], Meta(max_length=MAX_IMAGES)] = ()

    def __post_init__(self) -> None:
        for kind, parts, most in (("tables", self.tables, MAX_TABLE_BYTES), ("images", self.images, MAX_IMAGE_BYTES)):
            size = sum(len(part.data) for part in parts)
            if size > most:
                raise ValueError(f"{kind} of {size} bytes")

    def __bool__(self) -> bool:
        return bool(self.tables or self.images)

    @property
    def num_rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def parts(self) -> tuple[Table | Image, ...]:
        """In the order of the ids of their rows."""
        return *self.tables, *self.images

    def shared(self, take: "Callable[[tuple[Table | Image, ...]], tuple[Table | Image, ...]]") -> "PromptTables":
        """With what `take` returns for its parts."""
        found = take(self.parts)
        tables = tuple(part for part in found if isinstance(part, Table))
        return msgspec.structs.replace(self, tables=tables, images=tuple(i for i in found if isinstance(i, Image)))

    def truncated(self, num_tokens: int) -> "PromptTables":
        """For the last `num_tokens` of the prompt."""
        return msgspec.structs.replace(self, extra_ids=self.extra_ids[-num_tokens:])


NO_TABLES = PromptTables()


class PlacedTable(NamedTuple):
    """A table or an image among those of a request."""

    table: Table | Image
    first: int
    """Of the ids of its rows, less the size of the vocabulary."""

    def has(self, rows: Sequence[int]) -> bool:
        """Whether it has one of these."""
        return any(self.first <= row < self.first + self.table.rows for row in rows)


class VirtualTokens:
    """What the ids of a prompt from `vocab_size` on stand for."""

    def __init__(self, vocab_size: int, placed: tuple[PlacedTable, ...], extra_ids: tuple[int, ...] = ()) -> None:
        self.vocab_size = vocab_size
        self.placed = placed
        self._extra_ids = extra_ids

    @staticmethod
    def of(vocab_size: int, tables: PromptTables) -> "VirtualTokens | None":
        """None: there are no tables."""
        parts = tables.parts
        starts = accumulate((part.rows for part in parts), initial=0)
        placed = tuple(map(PlacedTable, parts, starts))
        return VirtualTokens(vocab_size, placed, tables.extra_ids) if placed else None

    def computed(self, ids: Sequence[int], rows_of: Callable[[Image], Table]) -> "VirtualTokens":
        """What these ids address, with tables in place of images."""
        rows = self._rows(ids)
        found = [each for each in self.placed if each.has(rows)]
        tables = [each.table if isinstance(each.table, Table) else rows_of(each.table) for each in found]
        placed = (PlacedTable(table, each.first) for table, each in zip(tables, found, strict=True))
        return VirtualTokens(self.vocab_size, tuple(placed))

    def occur(self, ids: Sequence[int]) -> bool:
        return max(ids, default=0) >= self.vocab_size

    def without(self, ids: Sequence[int]) -> list[int]:
        """Those of the vocabulary."""
        return [token for token in ids if token < self.vocab_size]

    def key(self, start: int, ids: Sequence[int]) -> bytes:
        """What tells these ids, from position `start` on, from equal ids of other tables: for a block's hash. Empty if
        they are of the vocabulary alone and have no extra ids."""
        rows = self._rows(ids)
        found = [each.table.digest + each.first.to_bytes(8, "little") for each in self.placed if each.has(rows)]
        extra = self._extra_ids[start : start + len(ids)]
        if not found and not any(extra):
            return b""
        # Behind the prompt there are none, whatever part of a block that is.
        padded = [*extra, *[0] * (len(ids) - len(extra))] if any(extra) else []
        numbers = [number.to_bytes(8, "little") for number in padded]
        return b"".join([len(found).to_bytes(1, "little"), *found, *numbers])

    def _rows(self, ids: Sequence[int]) -> list[int]:
        return [token - self.vocab_size for token in ids if token >= self.vocab_size]


def _digest(rows: int, hidden_size: int, dtype: str, data: bytes | memoryview) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"sluice-table")
    # Of fixed length: otherwise another shape could give the same bytes.
    digest.update(b"".join(size.to_bytes(8, "little") for size in (rows, hidden_size)) + dtype.ljust(8).encode())
    digest.update(data)
    return digest.digest()
