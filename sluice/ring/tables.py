"""Prompt tables on the ring: rows of embeddings that stand in a prompt where tokens would.

A prompt's ids from the size of the vocabulary on address the rows of all its tables, joined: vocab_size + i is row i,
as in TensorRT-LLM's PromptTuningConfig.
"""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from math import prod
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from sluice.ring.message import Number

MAX_TABLES = 16
"""In a request."""
MAX_TABLE_BYTES = 8 << 20
"""Of all tables of a request: less than a frame of a lane, or a message of gRPC, may have."""
DIGEST_BYTES = 16

FloatType = Literal["float32", "float16", "bfloat16"]
FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Size = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


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
    """The tables of a request."""

    tables: Annotated[tuple[Table, ...], Meta(max_length=MAX_TABLES)] = ()
    extra_ids: tuple[Number, ...] = ()
    """One per token of the prompt, or none: numbers that the caller wants block hashes to cover too."""

    def __post_init__(self) -> None:
        size = sum(len(table.data) for table in self.tables)
        if size > MAX_TABLE_BYTES:
            raise ValueError(f"tables of {size} bytes")

    def __bool__(self) -> bool:
        return bool(self.tables)

    @property
    def num_rows(self) -> int:
        return sum(table.rows for table in self.tables)

    def truncated(self, num_tokens: int) -> "PromptTables":
        """For the last `num_tokens` of the prompt."""
        return msgspec.structs.replace(self, extra_ids=self.extra_ids[-num_tokens:])


NO_TABLES = PromptTables()


class PlacedTable(NamedTuple):
    """A table among those of a request."""

    table: Table
    first: int
    """Of the ids of its rows, less the size of the vocabulary."""


class VirtualTokens:
    """What the ids of a prompt from `vocab_size` on stand for."""

    def __init__(self, vocab_size: int, tables: PromptTables) -> None:
        self.vocab_size = vocab_size
        starts = accumulate((table.rows for table in tables.tables), initial=0)
        self.placed = tuple(map(PlacedTable, tables.tables, starts))
        self._extra_ids = tables.extra_ids

    @staticmethod
    def of(vocab_size: int, tables: PromptTables) -> "VirtualTokens | None":
        return VirtualTokens(vocab_size, tables) if tables else None

    def occur(self, ids: Sequence[int]) -> bool:
        return max(ids, default=0) >= self.vocab_size

    def without(self, ids: Sequence[int]) -> list[int]:
        """Those of the vocabulary."""
        return [token for token in ids if token < self.vocab_size]

    def key(self, start: int, ids: Sequence[int]) -> bytes:
        """What tells these ids, from position `start` on, from equal ids of other tables: for a block's hash. Empty if
        they are of the vocabulary alone and have no extra ids."""
        rows = [token - self.vocab_size for token in ids if token >= self.vocab_size]
        found = [
            table.digest + first.to_bytes(8, "little")
            for table, first in self.placed
            if any(first <= row < first + table.rows for row in rows)
        ]
        extra = self._extra_ids[start : start + len(ids)]
        if not found and not any(extra):
            return b""
        # Behind the prompt there are none, whatever part of a block that is.
        padded = [*extra, *[0] * (len(ids) - len(extra))] if any(extra) else []
        numbers = [number.to_bytes(8, "little") for number in padded]
        return b"".join([len(found).to_bytes(1, "little"), *found, *numbers])


def _digest(rows: int, hidden_size: int, dtype: str, data: bytes | memoryview) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"sluice-table")
    # Of fixed length: otherwise another shape could give the same bytes.
    digest.update(b"".join(size.to_bytes(8, "little") for size in (rows, hidden_size)) + dtype.ljust(8).encode())
    digest.update(data)
    return digest.digest()
