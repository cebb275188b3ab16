"""Whose guide is next: tenants take turns, and one of them never holds all slots."""

from typing import Generic, Protocol, TypeVar

from engine_worker.guided.messages import Key


class Shared(Protocol):
    key: Key
    tenants: set[str]
    """Tenants that wait for it; more may join."""


G = TypeVar("G", bound=Shared)


class Turns(Generic[G]):
    """Guides that wait for a slot or hold one."""

    def __init__(self, num_slots: int) -> None:
        """At least two slots: a tenant gets all but one of them, so that another one finds a free slot at once."""
        self._num_slots = num_slots
        self._waiting: dict[Key, G] = {}
        self._holders: dict[Key, str] = {}
        """The tenants that hold slots."""
        self._last_turns: dict[str, int] = {}
        """By tenant, the number of its last turn. Forgotten once no guide waits."""
        self._num_turns = 0
        self.running: dict[Key, G] = {}
        """The guides that hold slots."""

    @property
    def waiting(self) -> list[G]:
        return list(self._waiting.values())

    def add(self, guide: G) -> None:
        self._waiting[guide.key] = guide

    def has_next(self) -> bool:
        return self._next() is not None

    def begin(self) -> G:
        """The next guide, which holds a slot from now on. Called if there is one."""
        chosen = self._next()
        if chosen is None:
            raise LookupError("no guide can have a slot")
        tenant, guide = chosen
        self._num_turns += 1
        self._last_turns[tenant] = self._num_turns
        del self._waiting[guide.key]
        if not self._waiting:
            self._last_turns.clear()
        self.running[guide.key], self._holders[guide.key] = guide, tenant
        return guide

    def discard(self, guide: G) -> None:
        """The guide waits no longer, or leaves its slot."""
        for guides in (self._waiting, self.running, self._holders):
            guides.pop(guide.key, None)

    def _next(self) -> tuple[str, G] | None:
        """The tenant whose turn is the longest ago, of those that may have another slot, and its first guide."""
        if len(self.running) >= self._num_slots:
            return None
        held = list(self._holders.values())
        full = {tenant for tenant in held if held.count(tenant) >= self._num_slots - 1}
        turns = [
            (self._last_turns.get(tenant, 0), i, tenant, guide)
            for i, guide in enumerate(self._waiting.values())
            for tenant in guide.tenants - full
        ]
        return min(turns, key=lambda turn: turn[:2])[2:] if turns else None
