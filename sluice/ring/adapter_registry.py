"""Which adapters are loaded under which id: every router and every engine has a registry, and these converge."""

from collections.abc import Iterable

from sluice.ring.adapters import MAX_ADAPTERS, NEWS_ENTRIES, AdapterEntry, AdapterNews

REMOVED_SECONDS = 3600.0
"""For which it is remembered that an id was unloaded: longer than a process is cut off from all others."""
MAX_REMOVED = 1024
CONFIGURED_AT = 0.0
"""Moment of the change of an adapter that a router's settings load. A call counts more, whenever it was: a router that
has just started may not have heard of it yet."""
LEAST_STEP_SECONDS = 0.001
"""Between two changes of an id, so that the later one counts, whatever the clocks say."""


class AdapterRegistry:
    """The latest entry of each id, in the order of the changes, which are numbered from 1."""

    def __init__(self) -> None:
        self.last = 0
        """Number of the last change."""
        self._numbered: dict[str, tuple[int, AdapterEntry]] = {}

    def __len__(self) -> int:
        """Adapters that are loaded."""
        return sum(not entry.removed for _, entry in self._numbered.values())

    def entries(self) -> list[AdapterEntry]:
        """Also of removed ones, in the order of the changes."""
        return [entry for _, entry in self._numbered.values()]

    def loaded(self) -> list[AdapterEntry]:
        return [entry for entry in self.entries() if not entry.removed]

    def find(self, adapter_id: str) -> AdapterEntry | None:
        """None if no adapter is loaded under this id."""
        entry = self.latest(adapter_id)
        return None if entry is None or entry.removed else entry

    def latest(self, adapter_id: str) -> AdapterEntry | None:
        """Also if it was removed."""
        return self._numbered.get(adapter_id, (0, None))[1]

    def moment_of_change(self, adapter_id: str, now: float) -> float:
        """For an entry that is to replace all that are known here."""
        latest = self.latest(adapter_id)
        return now if latest is None else max(now, latest.changed_at + LEAST_STEP_SECONDS)

    def merge(self, entry: AdapterEntry, now: float) -> bool:
        """Whether it is news. `now`: seconds of the Unix epoch. Not remembered: a removal that is too old, and a new id
        beyond MAX_ADAPTERS."""
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

    def since(self, known: int) -> AdapterNews | None:
        """The next changes after number `known`; None: there are none. A number of another process gets everything."""
        if known > self.last:
            known = 0
        found = [each for each in self._numbered.values() if each[0] > known][:NEWS_ENTRIES]
        return AdapterNews(found[-1][0], [entry for _, entry in found]) if found else None

    def missing_in(self, known: "AdapterRegistry", now: float) -> list[AdapterEntry]:
        """Entries that are newer here, and that it would remember."""
        found = (entry for entry in self.entries() if not _is_forgotten(entry, now))
        return [entry for entry in found if entry.replaces(known.latest(entry.id))]

    def _forget_removed(self, now: float) -> None:
        removed = [entry for entry in self.entries() if entry.removed]
        old = [entry for entry in removed if _is_forgotten(entry, now)]
        for entry in {each.id: each for each in (*old, *removed[:-MAX_REMOVED])}.values():
            del self._numbered[entry.id]


def _is_forgotten(entry: AdapterEntry, now: float) -> bool:
    return entry.removed and entry.changed_at < now - REMOVED_SECONDS


def has_more(news: AdapterNews | None) -> bool:
    """Whether further changes may follow it at once."""
    return news is not None and len(news.entries) == NEWS_ENTRIES


def merge_all(registry: AdapterRegistry, entries: Iterable[AdapterEntry], now: float) -> list[AdapterEntry]:
    """Those that are news."""
    return [entry for entry in entries if registry.merge(entry, now)]
