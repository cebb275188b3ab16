"""The streams of a detokenizer: those that live, and what is remembered of the others."""

from collections import OrderedDict

from detok_service.stream import Engine, Key, Stream
from sluice.ring.wire import End


class Table:
    """Of each request at most one attempt lives here.

    Sequences that ended here before the engine's own terminal came are remembered until it does: their rows are no
    news. So are attempts that were given up, for that may come before they begin. Both are at most `capacity`.
    """

    def __init__(self, capacity: int) -> None:
        self.live: dict[Key, Stream] = {}
        """To be looked at only."""
        self._requests: dict[int, list[Stream]] = {}
        """The live streams by request."""
        self._closed: OrderedDict[Key, Engine] = OrderedDict()
        self._given_up: OrderedDict[int, int] = OrderedDict()
        """By request, the last attempt that was; the latest requests last."""
        self._capacity = capacity

    @property
    def remembered(self) -> int:
        """Sequences whose engine is still to end them."""
        return len(self._closed)

    def attempt(self, request: int) -> int | None:
        """The attempt of this request that lives."""
        streams = self._requests.get(request)
        return streams[0].key[1] if streams else None

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

    def give_up(self, request: int, last: int) -> int:
        """Nothing is wanted of a request's attempts up to this one; how many streams of them lived."""
        streams = [stream for stream in self._requests.get(request, ()) if stream.key[1] <= last]
        for stream in streams:
            self.close(stream)
        self._given_up[request] = max(last, self._given_up.pop(request, last))
        if len(self._given_up) > self._capacity:
            self._given_up.popitem(last=False)
        return len(streams)

    def is_late(self, request: int, attempt: int) -> bool:
        """Whether it was given up, or a later one lives."""
        live = self.attempt(request)
        return attempt <= self._given_up.get(request, -1) or (live is not None and live > attempt)

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
        return self.is_late(*key[:2])

    def forget(self, engine: Engine) -> None:
        """No more rows will come from this engine."""
        for key in [key for key, owner in self._closed.items() if owner == engine]:
            del self._closed[key]
