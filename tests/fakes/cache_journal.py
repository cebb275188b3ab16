"""An engine's journal of prefix cache changes, of which routers are told in heartbeats."""

from sluice.wire.heartbeats import CacheChanges


class FakeJournal:
    """Changes are numbered from 1. Only the latest `max_kept` can be read one by one."""

    def __init__(self, max_kept: int = 1000) -> None:
        self.findable: set[int] = set()
        self.changes: list[tuple[int, bool]] = []
        self._max_kept = max_kept

    @property
    def last(self) -> int:
        return len(self.changes)

    def store(self, *blocks: int) -> None:
        self._change([(block, True) for block in blocks if block not in self.findable])

    def remove(self, *blocks: int) -> None:
        self._change([(block, False) for block in blocks if block in self.findable])

    def flush(self) -> None:
        self.remove(*self.findable)

    def changes_since(self, known: int) -> CacheChanges:
        """The changes after number `known`, or the whole cache if `known` is 0 or too long ago."""
        if not 0 <= known <= self.last or known < self.last - self._max_kept or not known:
            return CacheChanges(0, self.last, sorted(self.findable), whole=True)
        latest = dict(self.changes[known:])
        return CacheChanges(
            known,
            self.last,
            [block for block, stored in latest.items() if stored],
            [block for block, stored in latest.items() if not stored],
        )

    def at(self, number: int) -> set[int]:
        """The blocks in the prefix cache after change `number`."""
        return {block for block, stored in dict(self.changes[:number]).items() if stored}

    def _change(self, changes: list[tuple[int, bool]]) -> None:
        for block, stored in changes:
            (self.findable.add if stored else self.findable.remove)(block)
        self.changes += changes
