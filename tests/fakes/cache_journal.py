"""What an engine tells routers of its prefix cache: a journal of changes that reaches back only so far."""

from sluice.ring.heartbeats import CacheNews


class FakeJournal:
    """Changes are numbered from 1; `max_kept` of them are kept."""

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

    def news(self, since: int) -> CacheNews:
        """For a router that knows the changes up to number `since`; 0 if it knows another epoch."""
        if not 0 <= since <= self.last or since < self.last - self._max_kept or not since:
            return CacheNews(0, self.last, sorted(self.findable), whole=True)
        latest = dict(self.changes[since:])
        return CacheNews(
            since,
            self.last,
            [block for block, stored in latest.items() if stored],
            [block for block, stored in latest.items() if not stored],
        )

    def at(self, number: int) -> set[int]:
        """What was findable after that change."""
        return {block for block, stored in dict(self.changes[:number]).items() if stored}

    def _change(self, changes: list[tuple[int, bool]]) -> None:
        for block, stored in changes:
            (self.findable.add if stored else self.findable.remove)(block)
        self.changes += changes
