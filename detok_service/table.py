"""The streams of a detokenizer: those that live, and what is remembered of the others."""

from collections import OrderedDict

from detok_service.stream import Engine, Key, Stream
from sluice.ring.wire import End


class Table:
    """Of each request at most one attempt lives here.

    Sequences that ended here before the engine's own terminal came are remembered until it does, at most `capacity` of
    them: their rows are no news.
    """

    def __init__(self, capacity: int) -> None:
        self.live: dict[Key, Stream] = {}
        """To be looked at only."""
        self._requests: dict[int, list[Stream]] = {}
        """The live streams by request."""
        self._closed: OrderedDict[Key, Engine] = OrderedDict()
        self._capacity = capacity

    @property
    def remembered(self) -> int:
        """Sequences whose engine is still to end them."""
        return len(self._closed)

    def attempt(self, request: int) -> int | None:
        """The attempt of this request that lives."""
        streams = self._requests.get(request)
        return streams[0].key[1] if streams else None

    def of_attempts(self, request: int, last: int) -> list[Stream]:
        """The live streams of a request's attempts up to this one."""
        return [stream for stream in self._requests.get(request, ()) if stream.key[1] <= last]

    def of_engine(self, engine: Engine) -> list[Stream]:
        """The live streams that this engine feeds."""
        return [stream for stream in self.live.values() if stream.engine == engine]

    def of_router(self, address: str) -> list[Stream]:
        """The live streams that go to this router."""
        return [stream for stream in self.live.values() if stream.router == address]

    def add(self, stream: Stream) -> None:
        """A stream begins."""
        self.live[stream.key] = stream
        self._requests.setdefault(stream.key[0], []).append(stream)

    def close(self, stream: Stream) -> None:
        """A stream has ended, or is given up."""
        del self.live[stream.key]
        request = stream.key[0]
        streams = self._requests[request]
        streams.remove(stream)
        if not streams:
            del self._requests[request]
        if not stream.complete:
            self.remember(stream.key, stream.engine)

    def remember(self, key: Key, engine: Engine) -> None:
        """Rows of this sequence are expected, and of no use."""
        self._closed[key] = engine
        if len(self._closed) > self._capacity:
            self._closed.popitem(last=False)

    def expects(self, key: Key, end: End | None) -> bool:
        """Whether a row of a sequence that does not live is no news; forgets the sequence with its end."""
        if key in self._closed:
            if end is not None:
                del self._closed[key]
            return True
        attempt = self.attempt(key[0])
        return attempt is not None and attempt > key[1]

    def forget(self, engine: Engine) -> None:
        """No more rows will come from this engine."""
        for key in [key for key, owner in self._closed.items() if owner == engine]:
            del self._closed[key]
