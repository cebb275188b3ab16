"""Prompt adapters on the ring: tables of prompt tuning that are loaded once and named by requests.

Routers put a named table into each request, so engines compute them like any other. Engines keep the tables for other
routers, and for routers that start later: every router and every engine has a store, and these converge.
"""

from sluice.ring.adapter_registry import AdapterRegistry
from sluice.ring.adapters import AdapterEntry, AdapterId
from sluice.ring.message import Message, Name, Number
from sluice.ring.tables import Table

MAX_LOADED_BYTES = 128 << 20
"""Of the tables that ids stand for: a router loads no more."""
MAX_KEPT_BYTES = 2 * MAX_LOADED_BYTES
"""In a store. More than a router loads, so that what several of them load at the same moment is kept too."""


class StorePromptAdapter(Message, frozen=True):
    """router → engine: an entry that the engine lacks."""

    engine_epoch: Number
    entry: AdapterEntry
    table: Table | None = None
    """None: the entry is of a removal."""

    def __post_init__(self) -> None:
        _check(self.entry, self.table)


class ReadPromptAdapter(Message, frozen=True):
    """router → engine: send the table of an id to this router."""

    engine_epoch: Number
    id: AdapterId
    router: Name
    """Address of its inbox."""


class PromptAdapterRead(Message, frozen=True):
    """engine → router on the side lane."""

    engine_epoch: Number
    entry: AdapterEntry
    table: Table

    def __post_init__(self) -> None:
        _check(self.entry, self.table)


PromptAdapterMessage = StorePromptAdapter | ReadPromptAdapter


class PromptAdapterStore:
    """What each id stands for, and the tables: an entry is never here without its table."""

    def __init__(self, kept_seconds: float = 0.0) -> None:
        """`kept_seconds`: for which a table stays after the last id that stood for it has changed."""
        self.registry = AdapterRegistry()
        self._kept_seconds = kept_seconds
        self._tables: dict[str, Table] = {}
        """By version."""
        self._unnamed: dict[str, float] = {}
        """Versions that no id stands for any more, with the time since which, the oldest first."""

    @property
    def loaded_bytes(self) -> int:
        """Of the tables that ids stand for."""
        return sum(len(table.data) for version, table in self._tables.items() if version not in self._unnamed)

    def find(self, adapter_id: str) -> Table | None:
        """None: no table is loaded under this id."""
        entry = self.registry.find(adapter_id)
        return None if entry is None else self._tables[entry.version]

    def table(self, version: str) -> Table | None:
        """Also one that no id stands for any more, for a while."""
        return self._tables.get(version)

    def merge(self, entry: AdapterEntry, table: Table | None, now: float) -> bool:
        """Whether it is news. `table`: None if the entry is of a removal. `now`: seconds of the Unix epoch. Not kept:
        what `AdapterRegistry.merge` does not, and a table for which there is no room."""
        if table is not None and self.loaded_bytes + len(table.data) > MAX_KEPT_BYTES:
            return False
        if not self.registry.merge(entry, now):
            return False
        if table is not None:
            self._tables[entry.version] = table
        self.forget(now)
        return True

    def forget(self, now: float) -> None:
        """Tables that no id has stood for long enough, and older ones where room is needed."""
        named = {entry.version for entry in self.registry.loaded()}
        self._unnamed = {version: self._unnamed.get(version, now) for version in self._tables if version not in named}
        kept = sum(len(table.data) for table in self._tables.values())
        for version, since in sorted(self._unnamed.items(), key=lambda item: item[1]):
            if now - since >= self._kept_seconds or kept > MAX_KEPT_BYTES:
                kept -= len(self._tables.pop(version).data)
                del self._unnamed[version]


def version_of(table: Table) -> str:
    return table.digest.hex()


def _check(entry: AdapterEntry, table: Table | None) -> None:
    if entry.removed is not (table is None):
        raise ValueError(f"{entry.id!r} is {'removed' if entry.removed else 'loaded'}, which does not fit its table")
    if table is not None and (entry.version != version_of(table) or entry.size != table.rows):
        raise ValueError(f"{entry.id!r} stands for another table")
