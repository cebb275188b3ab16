"""The adapters that are loaded, by id. Every router and every engine has a registry of each kind, and all registries of
a kind converge."""

from collections.abc import Iterable

from sluice.wire.adapters import MAX_ADAPTERS, MAX_MESSAGE_ENTRIES, AdapterChanges, AdapterEntry
from sluice.wire.tables import Table

REMOVED_SECONDS = 3600.0
"""Time for which the removal of an id is remembered: longer than a process can be cut off from all others."""
MAX_REMOVED = 1024
CONFIGURED_AT = 0.0
"""`changed_at` of an adapter that a router's settings load. Any call takes precedence over it, because a router that
has just started may not have received earlier calls yet."""
LEAST_STEP_SECONDS = 0.001
"""Minimum time between two changes of an id, so that the later change counts even if clocks differ."""
MAX_LOADED_BYTES = 128 << 20
"""Maximum size of the loaded tables in a router."""
MAX_KEPT_BYTES = 2 * MAX_LOADED_BYTES
"""Maximum size of a store. Larger than MAX_LOADED_BYTES, so that several routers can load tables at the same time."""


class AdapterRegistry:
    """The latest entry of each id, in the order of the changes, which are numbered from 1."""

    def __init__(self) -> None:
        self.last = 0
        """Number of the last change."""
        self._numbered: dict[str, tuple[int, AdapterEntry]] = {}

    def __len__(self) -> int:
        """Number of adapters that are loaded."""
        return sum(not entry.removed for _, entry in self._numbered.values())

    def entries(self) -> list[AdapterEntry]:
        """All entries, including removed ones, in the order of the changes."""
        return [entry for _, entry in self._numbered.values()]

    def loaded(self) -> list[AdapterEntry]:
        return [entry for entry in self.entries() if not entry.removed]

    def find(self, adapter_id: str) -> AdapterEntry | None:
        """The entry of a loaded adapter. None if no adapter is loaded under this id."""
        entry = self.latest(adapter_id)
        return None if entry is None or entry.removed else entry

    def latest(self, adapter_id: str) -> AdapterEntry | None:
        """The latest entry of an id, even if the adapter was removed."""
        return self._numbered.get(adapter_id, (0, None))[1]

    def moment_of_change(self, adapter_id: str, now: float) -> float:
        """`changed_at` for a new entry that is to replace every entry known here."""
        latest = self.latest(adapter_id)
        return now if latest is None else max(now, latest.changed_at + LEAST_STEP_SECONDS)

    def merge(self, entry: AdapterEntry, now: float) -> bool:
        """Add an entry if it is newer than the known one. Returns whether it was added.

        Removals that are too old, and new ids beyond MAX_ADAPTERS, are not added. `now`: seconds of the Unix epoch.
        """
        known = self.latest(entry.id)
        if not entry.replaces(known) or _is_forgotten(entry, now):
            return False
        if not entry.removed and self.find(entry.id) is None and len(self) >= MAX_ADAPTERS:
            return False
        self._numbered.pop(entry.id, None)
        self.last += 1
        self._numbered[entry.id] = self.last, entry
        self._forget_removed(now)
        return True

    def since(self, known: int) -> AdapterChanges | None:
        """The next changes after number `known`; None if nothing has changed since.

        A number beyond the last change is that of a former process here, and yields everything.
        """
        if known > self.last:
            known = 0
        changes = [change for change in self._numbered.values() if change[0] > known][:MAX_MESSAGE_ENTRIES]
        return AdapterChanges(changes[-1][0], [entry for _, entry in changes]) if changes else None

    def missing_in(self, other: "AdapterRegistry", now: float) -> list[AdapterEntry]:
        """Entries that are newer here than in `other` and that `other` would remember."""
        entries = (entry for entry in self.entries() if not _is_forgotten(entry, now))
        return [entry for entry in entries if entry.replaces(other.latest(entry.id))]

    def _forget_removed(self, now: float) -> None:
        removed = [entry for entry in self.entries() if entry.removed]
        expired = [entry for entry in removed if _is_forgotten(entry, now)]
        for adapter_id in {entry.id for entry in (*expired, *removed[:-MAX_REMOVED])}:
            del self._numbered[adapter_id]


def _is_forgotten(entry: AdapterEntry, now: float) -> bool:
    return entry.removed and entry.changed_at < now - REMOVED_SECONDS


def has_more(changes: AdapterChanges | None) -> bool:
    """Whether further changes may follow immediately."""
    return changes is not None and len(changes.entries) == MAX_MESSAGE_ENTRIES


def merge_all(registry: AdapterRegistry, entries: Iterable[AdapterEntry], now: float) -> list[AdapterEntry]:
    """Merge entries into a registry. Returns those that were added."""
    return [entry for entry in entries if registry.merge(entry, now)]


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
