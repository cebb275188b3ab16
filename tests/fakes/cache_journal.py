"""What an engine tells routers of its prefix cache: a journal of changes that reaches back only so far."""

from sluice.ring.heartbeats import CacheNews


class FakeJournal:
    """Changes are numbered from 1; `most` of them are kept."""

    def __init__(self, most: int = 1000) -> None:
        self.findable: set[int] = set()
        self.changes: list[tuple[int, bool]] = []
        self._most = most

    @property
    def last(self) -> int:
        return len(self.changes)

    def store(self, *blocks: int) -> None:
        self._change([(block, True) for block in blocks if block not in self.findable])

    def remove(self, *blocks: int) -> None:
        self._change([(block, False) for block in blocks if block in self.findable])

    def flush(self) -> None:
        self.remove(*self.findable)

    def news(self, heard: int) -> CacheNews:
        """For a router that has heard so much; what it has heard of another epoch is nothing."""
        if not 0 <= heard <= self.last or heard < self.last - self._most or not heard:
            return CacheNews(0, self.last, sorted(self.findable), whole=True)
        latest = dict(self.changes[heard:])
        return CacheNews(
            heard,
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
