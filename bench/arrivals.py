"""Which requests of an engine's load go in when."""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from bench.engine_load import EngineLoad
from bench.load import Feed
from sluice.ring.wire import TokenRow


class Arrivals:
    """Requests without a time of their own go in `width` at a time; after them in the load the others, each when it is
    its time, whatever else is live. Requests are known by their index in the load."""

    def __init__(self, load: EngineLoad) -> None:
        self._times = [ask.arrives for ask in load.asks if ask.arrives is not None]
        self._untimed = len(load.asks) - len(self._times)
        self._feed = Feed(replace(load, asks=load.asks[: self._untimed]))
        self._silent = self._untimed
        """Untimed requests that have not had a token."""
        self._zero = 0.0
        """When they all had."""
        self._come = 0
        """Timed requests that were handed in."""
        self._live = 0
        """Of these."""

    @property
    def over(self) -> bool:
        """Everything that came has ended, and nothing more will come."""
        return not self._feed.live and not self._live and self._come == len(self._times)

    def due(self, now: float) -> Iterator[tuple[int, float]]:
        """Requests to submit now, and when each of them came; seconds since the load began."""
        for i in self._feed.due():
            yield i, now
        while not self._silent and self._come < len(self._times):
            at = self._zero + self._times[self._come]
            if at > now:
                break
            self._come += 1
            self._live += 1
            yield self._untimed + self._come - 1, at

    def heard(self, now: float, rows: Iterable[tuple[int, TokenRow]]) -> None:
        """What the engine said about each request."""
        for i, row in rows:
            if i >= self._untimed:
                self._live -= row.end is not None
                continue
            if row.offset == 0 and row.tokens:
                self._silent -= 1
                self._zero = now
            if row.end is not None:
                self._feed.ended()
