"""Prompt tables on the ring: rows of embeddings that take the place of tokens in a prompt.

Ids in a prompt that are at least the size of the vocabulary refer to rows of the concatenated tables: vocab_size + i is
row i, as in TensorRT-LLM's PromptTuningConfig. An image is a table whose rows the engine computes from an encoded
picture; images come after tables.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import accumulate
from math import prod
from typing import Annotated, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

import msgspec
from msgspec import Meta

from sluice.wire.message import Number

MAX_TABLES = 16
"""Maximum number of tables in a request."""
MAX_TABLE_BYTES = 8 << 20
"""Maximum size of all tables of a request, less than the limits of a lane's frame and of a gRPC message."""
MAX_IMAGES = 16
"""Maximum number of images in a request."""
MAX_IMAGE_BYTES = 8 << 20
"""Maximum size of all images of a request, less than the limits of a lane's frame and of a gRPC message."""
MAX_PIXELS = 1 << 24
"""Maximum size of a decoded image, such as 4096 x 4096. A file of a few kilobytes may decode to gigabytes."""
FORMATS = ("PNG", "JPEG", "WEBP")
"""Pillow's names of the decoders that may be used."""
DIGEST_BYTES = 16

FloatType = Literal["float32", "float16", "bfloat16"]
FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Size = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Columns = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]


class _Rows(msgspec.Struct, frozen=True, array_like=True):
    """What tables and images have in common."""

    person: ClassVar[bytes]
    """Makes the digest of a table differ from that of an image with the same bytes."""

    digest: Digest
    """Digest of the fields below, which block hashes include. What a model makes of an image is covered by the model's
    fingerprint."""
    rows: Size
    data: memoryview

    @property
    @abstractmethod
    def shape(self) -> tuple[object, ...]:
        """The fields other than the digest and the data."""

    def with_digest(self) -> Self:
        """A copy with its digest, which takes a millisecond per megabyte to compute."""
        return msgspec.structs.replace(self, digest=self._digest())

    @property
    def intact(self) -> bool:
        """Whether the digest matches the data. Takes as long as `with_digest`."""
        return self.digest == self._digest()

    def _digest(self) -> bytes:
        digest = blake2b(digest_size=DIGEST_BYTES, person=self.person)
        # JSON marks where the shape ends. Otherwise another shape with other data could yield the same bytes.
        digest.update(msgspec.json.encode(self.shape))
        digest.update(self.data)
        return digest.digest()


UNKNOWN = bytes(DIGEST_BYTES)


class Table(_Rows, frozen=True, array_like=True):
    """Rows of embeddings, which are passed to the first layer like those of tokens.

    data: [rows, hidden_size], row-major, little-endian.
    """

    person: ClassVar[bytes] = b"sluice-table"

    hidden_size: Size
    dtype: FloatType

    def __post_init__(self) -> None:
        size = prod((self.rows, self.hidden_size, FLOAT_BYTES[self.dtype]))
        if len(self.data) != size:
            raise ValueError(
                f"a table of {self.rows} rows of {self.hidden_size} {self.dtype} values must have {size} bytes "
                f"(got {len(self.data)})"
            )

    @staticmethod
    def of(rows: int, hidden_size: int, dtype: FloatType, data: bytes | memoryview) -> "Table":
        """A table with its digest. Raises ValueError if sizes do not match."""
        return Table(UNKNOWN, rows, memoryview(data), hidden_size, dtype).with_digest()

    @property
    def shape(self) -> tuple[object, ...]:
        return self.rows, self.hidden_size, self.dtype


class Image(_Rows, frozen=True, array_like=True):
    """An image in a prompt, where it takes the place of as many tokens as it has rows.

    data: a file in one of FORMATS. If it contains several pictures, the first is used.
    """

    person: ClassVar[bytes] = b"sluice-image"

    columns: Columns = 0
    """Number of columns of the grid in which the rows have positions. 0: rows have positions like tokens."""

    def __post_init__(self) -> None:
        if self.columns and self.rows % self.columns:
            raise ValueError(f"an image of {self.rows} rows cannot have a grid of {self.columns} columns")

    @staticmethod
    def of(rows: int, data: bytes | memoryview, columns: int = 0) -> "Image":
        """An image with its digest."""
        return Image(UNKNOWN, rows, memoryview(data), columns).with_digest()

    @property
    def shape(self) -> tuple[object, ...]:
        return self.rows, self.columns


class PromptTables(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tables and images of a request."""

    tables: Annotated[tuple[Table, ...], Meta(max_length=MAX_TABLES)] = ()
    extra_ids: tuple[Number, ...] = ()
    """Empty, or one per token of the prompt: the caller's numbers that block hashes include too."""
    images: Annotated[tuple[Image, ...], Meta(max_length=MAX_IMAGES)] = ()

    def __post_init__(self) -> None:
        for kind, parts, limit in (("tables", self.tables, MAX_TABLE_BYTES), ("images", self.images, MAX_IMAGE_BYTES)):
            size = sum(len(part.data) for part in parts)
            if size > limit:
                raise ValueError(f"{kind} may have at most {limit} bytes in total (got {size})")

    def __bool__(self) -> bool:
        return bool(self.tables or self.images)

    @property
    def num_rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def parts(self) -> tuple[Table | Image, ...]:
        """Tables and images in the order of their rows' ids."""
        return *self.tables, *self.images

    def shared(self, take: Callable[[tuple[Table | Image, ...]], tuple[Table | Image, ...]]) -> "PromptTables":
        """The same with the parts that `take` returns for its parts, see `SharedTables.take`."""
        taken = take(self.parts)
        tables = tuple(part for part in taken if isinstance(part, Table))
        images = tuple(part for part in taken if isinstance(part, Image))
        return msgspec.structs.replace(self, tables=tables, images=images)

    def truncated(self, num_tokens: int) -> "PromptTables":
        """The same for the last `num_tokens` of the prompt."""
        return msgspec.structs.replace(self, extra_ids=self.extra_ids[-num_tokens:])


NO_TABLES = PromptTables()


class PlacedTable(NamedTuple):
    """A table or an image among those of a request."""

    table: Table | Image
    first: int
    """Number of its first row: the row's id minus the size of the vocabulary."""

    def has(self, rows: Sequence[int]) -> bool:
        """Whether it contains any of these rows."""
        return any(self.first <= row < self.first + self.table.rows for row in rows)


class VirtualTokens:
    """The meaning of the ids in a prompt that are at least `vocab_size`."""

    def __init__(self, vocab_size: int, placed: tuple[PlacedTable, ...], extra_ids: tuple[int, ...] = ()) -> None:
        self.vocab_size = vocab_size
        self.placed = placed
        self._extra_ids = extra_ids

    @staticmethod
    def of(vocab_size: int, tables: PromptTables | None) -> "VirtualTokens | None":
        """The virtual tokens of a request. None if it has no tables or images."""
        if tables is None:
            return None
        parts = tables.parts
        starts = accumulate((part.rows for part in parts), initial=0)
        placed = tuple(map(PlacedTable, parts, starts))
        return VirtualTokens(vocab_size, placed, tables.extra_ids) if placed else None

    def computed(self, ids: Sequence[int], rows_of: Callable[[Image], Table]) -> "VirtualTokens":
        """The tables that these ids refer to, with the tables of `rows_of` in place of images."""
        rows = self._rows(ids)
        used = [placed for placed in self.placed if placed.has(rows)]
        tables = [placed.table if isinstance(placed.table, Table) else rows_of(placed.table) for placed in used]
        return VirtualTokens(
            self.vocab_size, tuple(PlacedTable(table, placed.first) for table, placed in zip(tables, used, strict=True))
        )

    def occur(self, ids: Sequence[int]) -> bool:
        """Whether any of these ids refers to a row."""
        return max(ids, default=0) >= self.vocab_size

    def without(self, ids: Sequence[int]) -> list[int]:
        """The ids that are tokens of the vocabulary."""
        return [token for token in ids if token < self.vocab_size]

    def key(self, start: int, ids: Sequence[int]) -> bytes:
        """A key for a block's hash that distinguishes these ids from equal ids that refer to other tables.

        `start`: position of the first id. Empty if the ids are tokens of the vocabulary without extra ids.
        """
        rows = self._rows(ids)
        used = [placed.table.digest + placed.first.to_bytes(8, "little") for placed in self.placed if placed.has(rows)]
        extra = self._extra_ids[start : start + len(ids)]
        if not used and not any(extra):
            return b""
        # Tokens after the prompt have no extra ids, which is equivalent to ids of 0.
        padded = [*extra, *[0] * (len(ids) - len(extra))] if any(extra) else []
        numbers = [number.to_bytes(8, "little") for number in padded]
        return b"".join([len(used).to_bytes(1, "little"), *used, *numbers])

    def _rows(self, ids: Sequence[int]) -> list[int]:
        return [token - self.vocab_size for token in ids if token >= self.vocab_size]


Part = TypeVar("Part", bound=Table | Image)


class SharedTables(Generic[Part]):
    """A reference-counted store, by digest, of the tables or images of a service's requests: equal ones are in memory
    once, and the total size is known."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Total size of the stored tables or images."""
        self._parts: dict[bytes, Part] = {}
        """By digest."""
        self._users: dict[bytes, int] = {}
        """Number of references by digest."""

    def knows(self, part: Part) -> bool:
        """Whether an equal part is stored, so that the digest of `part` need not be verified."""
        stored = self._parts.get(part.digest)
        # A part whose digest has not been verified may have another shape.
        return stored is not None and stored.shape == part.shape

    def num_bytes_with(self, parts: Iterable[Part]) -> int:
        """The value of `num_bytes` after `take` of these parts."""
        new = {part.digest: len(part.data) for part in parts if part.digest not in self._parts}
        return self.num_bytes + sum(new.values())

    def take(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        """Store parts, or add references to equal stored ones. Returns the stored parts, to be released later."""
        return tuple(map(self._take, parts))

    def release(self, parts: Iterable[Part]) -> None:
        """Drop one reference to each part."""
        for part in parts:
            self._users[part.digest] -= 1
            if not self._users[part.digest]:
                del self._users[part.digest]
                self.num_bytes -= len(self._parts.pop(part.digest).data)

    def _take(self, part: Part) -> Part:
        if part.digest not in self._parts:
            self._parts[part.digest] = part
            self.num_bytes += len(part.data)
        self._users[part.digest] = self._users.get(part.digest, 0) + 1
        return self._parts[part.digest]
