"""Prompt adapters on the ring: tables of prompt tuning that are loaded once and that requests refer to by id.

Routers put the table into each request, so for engines it is like any other table. Engines store the tables for other
routers, and for routers that start later. Every router and every engine has a store, and all stores converge.
"""

from sluice.wire.adapter_registry import AdapterRegistry
from sluice.wire.adapters import AdapterEntry, AdapterId
from sluice.wire.message import Message, Name, Number
from sluice.wire.tables import Table

MAX_LOADED_BYTES = 128 << 20
"""Maximum size of the loaded tables in a router."""
MAX_KEPT_BYTES = 2 * MAX_LOADED_BYTES
"""Maximum size of a store. Larger than MAX_LOADED_BYTES, so that several routers can load tables at the same time."""


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


class PromptAdapterStore:
    """The entry and the table of each id. Every entry of a loaded adapter has its table."""

    def __init__(self, kept_seconds: float = 0.0) -> None:
        """`kept_seconds`: how long a table is kept after the last id that referred to it has changed."""
        self.registry = AdapterRegistry()
        self._kept_seconds = kept_seconds
        self._tables: dict[str, Table] = {}
        """By version."""
        self._unreferenced: dict[str, float] = {}
        """Versions that no id refers to any more, with the time at which that began, oldest first."""

    @property
    def loaded_bytes(self) -> int:
        """Size of the tables that ids refer to."""
        return sum(len(table.data) for version, table in self._tables.items() if version not in self._unreferenced)

    def find(self, adapter_id: str) -> Table | None:
        """The table of an id. None if no table is loaded under this id."""
        entry = self.registry.find(adapter_id)
        return None if entry is None else self._tables[entry.version]

    def table(self, version: str) -> Table | None:
        """The table of a version, for a while even after the last id that referred to it has changed."""
        return self._tables.get(version)

    def merge(self, entry: AdapterEntry, table: Table | None, now: float) -> bool:
        """Add an entry if it is newer than the known one. Returns whether it was added.

        Not added are entries that `AdapterRegistry.merge` does not add, and tables that do not fit. `table`: None if
        the entry is a removal. `now`: seconds of the Unix epoch.
        """
        if table is not None and self.loaded_bytes + len(table.data) > MAX_KEPT_BYTES:
            return False
        if not self.registry.merge(entry, now):
            return False
        if table is not None:
            self._tables[entry.version] = table
        self.forget(now)
        return True

    def forget(self, now: float) -> None:
        """Drop tables that no id has referred to for `kept_seconds`, and the oldest of the others if room is needed."""
        referenced = {entry.version for entry in self.registry.loaded()}
        self._unreferenced = {
            version: self._unreferenced.get(version, now) for version in self._tables if version not in referenced
        }
        size = sum(len(table.data) for table in self._tables.values())
        for version, since in sorted(self._unreferenced.items(), key=lambda item: item[1]):
            if now - since >= self._kept_seconds or size > MAX_KEPT_BYTES:
                size -= len(self._tables.pop(version).data)
                del self._unreferenced[version]


def version_of(table: Table) -> str:
    return table.digest.hex()


def _check(entry: AdapterEntry, table: Table | None) -> None:
    if entry.removed is not (table is None):
        raise ValueError(f"{entry.id!r}: a removed entry must have no table, and a loaded one must have a table")
    if table is not None and (entry.version != version_of(table) or entry.size != table.rows):
        raise ValueError(f"{entry.id!r}: version or size of the entry does not match the table")
