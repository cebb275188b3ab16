"""Adapters on the ring: how requests refer to them, their files, and the messages that load them.

A prompt adapter is a table of prompt tuning. Routers put the table into each request, so for engines it is like any
other table. Engines store the tables for other routers, and for routers that start later.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from sluice.wire.errors import Fault
from sluice.wire.message import Count, Message, Moment, Name, Number, Total
from sluice.wire.tables import Table

MAX_ID_CHARS = 256
VERSION_BYTES = 16
MAX_FILE_BYTES = 1 << 30
"""Maximum size of an adapter's weights."""
MAX_CONFIG_BYTES = 1 << 20
MAX_ADAPTERS = 1024
"""Maximum number of adapters that are loaded at the same time."""
MAX_MESSAGE_ENTRIES = 256
"""Maximum number of entries in one message, which is what a starting router receives per second."""
PART_BYTES = 1 << 18
"""Maximum size of uploaded data in one message. It is small because later messages on the lane wait behind it."""
MAX_PARTS = (MAX_FILE_BYTES + MAX_CONFIG_BYTES) // PART_BYTES + 1

ADAPTER_ID = re.compile(rf"[A-Za-z0-9._:/-]{{1,{MAX_ID_CHARS}}}", re.ASCII)
"""Ids that a caller or an operator may choose."""
AdapterId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
AdapterVersion = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * VERSION_BYTES}}}$")]


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter as a request refers to it: the operator's id, and the weights that the id referred to at that time."""

    id: AdapterId
    version: AdapterVersion
    """Hash of weights and configuration. An id that is loaded again with other weights has another version."""
    path: Name = ""
    """The adapter's folder on the engines' machines. Empty if its files were uploaded."""


Data = bytes | memoryview


class AdapterFiles(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The two files of an adapter as peft saves it."""

    config: bytes
    """adapter_config.json."""
    weights: Data
    """adapter_model.safetensors."""

    @cached_property
    def version(self) -> str:
        """Hash of both files, in hex. Computed once; takes a second per GiB."""
        digest = blake2b(digest_size=VERSION_BYTES, person=b"sluice-lora")
        for data in (self.config, self.weights):
            # Each file is preceded by its length. Otherwise different files could yield the same bytes.
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        return len(self.config) + len(self.weights)


class AdapterEntry(msgspec.Struct, frozen=True, array_like=True):
    """What an id refers to since a given time. Routers and engines exchange entries; the latest change counts."""

    id: AdapterId
    changed_at: Moment
    version: AdapterVersion
    path: Name = ""
    """See `Adapter`."""
    size: Count = 0
    """The rank of a LoRA adapter, or the number of rows of a prompt adapter."""
    removed: bool = False
    """Whether the adapter was unloaded."""

    @property
    def adapter(self) -> Adapter:
        return Adapter(self.id, self.version, self.path)

    def replaces(self, other: "AdapterEntry | None") -> bool:
        return other is None or self._order > other._order

    @property
    def _order(self) -> tuple[float, bool, str, str]:
        # Of two changes at the same time, every process must choose the same one.
        return self.changed_at, self.removed, self.version, self.path


class AdapterChanges(msgspec.Struct, frozen=True, array_like=True):
    """Changes of an engine's entries after the number in the router's hello. Changes are numbered from 1."""

    last: Total
    """Number of the last change in `entries`."""
    entries: Annotated[list[AdapterEntry], Meta(max_length=MAX_MESSAGE_ENTRIES)]


class AdapterEntries(Message, frozen=True):
    """router → engine: entries that the engine does not have."""

    engine_epoch: Number
    entries: Annotated[list[AdapterEntry], Meta(max_length=MAX_MESSAGE_ENTRIES)]


class LoadAdapter(Message, frozen=True):
    """router → engine: load an adapter into host memory, and answer with `AdapterLoaded`."""

    engine_epoch: Number
    number: Number
    """Random; identifies this message in the answer."""
    router: Name
    """Address of the inbox for the answer."""
    path: Name = ""
    """The adapter's folder. Empty if its files were sent in parts before this message."""
    version: AdapterVersion | None = None
    """Version of these files. None with `path`: the engine computes it."""


class AdapterPart(Message, frozen=True):
    """router → engine: a part of an adapter's files, which are `AdapterFiles` in MessagePack. Sent in order, from 0."""

    engine_epoch: Number
    version: AdapterVersion
    index: Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
    count: Annotated[int, Meta(ge=1, le=MAX_PARTS)]
    data: Annotated[bytes, Meta(min_length=1, max_length=PART_BYTES)]


class AdapterLoaded(Message, frozen=True):
    """engine → router on the side lane: the answer to `LoadAdapter`."""

    engine_epoch: Number
    number: Number
    version: str = ""
    """Empty if the adapter could not be loaded."""
    rank: Count = 0
    fault: Fault | None = None


AdapterMessage = AdapterEntries | AdapterPart | LoadAdapter


def parts_of(files: AdapterFiles, engine_epoch: int) -> Iterator[AdapterPart]:
    """The messages that carry the files to an engine."""
    data = memoryview(msgspec.msgpack.encode(files))
    version, count = files.version, -(-len(data) // PART_BYTES)
    for index in range(count):
        yield AdapterPart(
            engine_epoch, version, index, count, bytes(data[index * PART_BYTES : (index + 1) * PART_BYTES])
        )


def join_parts(parts: Iterable[bytes]) -> AdapterFiles:
    """The files from the data of all parts. Raises msgspec.DecodeError."""
    # The weights are a view, because copying them would hold the interpreter's lock for a long time.
    config, weights = msgspec.msgpack.decode(b"".join(parts), type=tuple[bytes, memoryview])
    return AdapterFiles(config, weights)


class StorePromptAdapter(Message, frozen=True):
    """router → engine: an entry that the engine does not have."""

    engine_epoch: Number
    entry: AdapterEntry
    table: Table | None = None
    """None if the entry is a removal."""

    def __post_init__(self) -> None:
        _check(self.entry, self.table)


class ReadPromptAdapter(Message, frozen=True):
    """router → engine: send the table of an id to this router."""

    engine_epoch: Number
    id: AdapterId
    router: Name
    """Address of the router's inbox."""


class PromptAdapterRead(Message, frozen=True):
    """engine → router on the side lane: the answer to `ReadPromptAdapter`."""

    engine_epoch: Number
    entry: AdapterEntry
    table: Table

    def __post_init__(self) -> None:
        _check(self.entry, self.table)


PromptAdapterMessage = StorePromptAdapter | ReadPromptAdapter


def version_of(table: Table) -> str:
    return table.digest.hex()


def _check(entry: AdapterEntry, table: Table | None) -> None:
    if entry.removed is not (table is None):
        raise ValueError(f"{entry.id!r}: a removed entry must have no table, and a loaded one must have a table")
    if table is not None and (entry.version != version_of(table) or entry.size != table.rows):
        raise ValueError(f"{entry.id!r}: version or size of the entry does not match the table")
