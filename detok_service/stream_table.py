"""Which streams live, and what is remembered of those that have ended."""

from collections import OrderedDict

from detok_service.stream import Engine, Key, TextStream
from sluice.ring.rows import End


class StreamTable:
    """The live streams, at most one attempt of each request, and what must be remembered of others.

    A sequence that ended here before the engine's own terminal came is remembered until then, so that its rows are not
    mistaken for those of a lost stream. So are attempts that were given up, since a Drop may overtake the attempt's
    Open. At most `capacity` of each are remembered.
    """

    def __init__(self, capacity: int) -> None:
        self.live: dict[Key, TextStream] = {}
        """Read-only for others."""
        self._requests: dict[int, list[TextStream]] = {}
        """The live streams by request."""
        self._closed: OrderedDict[Key, Engine] = OrderedDict()
        """Sequences that ended here and not yet at their engine, by key."""
        self._given_up: OrderedDict[int, int] = OrderedDict()
        """The last attempt that was given up, by request; the latest requests last."""
        self._capacity = capacity

    def attempt(self, request: int) -> int | None:
        """The live attempt of this request."""
        streams = self._requests.get(request)
        return streams[0].key[1] if streams else None

    def router(self, request: int, attempt: int) -> str | None:
        """Where the text of this attempt goes; None if it does not live."""
        streams = self._requests.get(request)
        return streams[0].router if streams and streams[0].key[1] == attempt else None

    # A scan over all streams: an engine or a router is lost too rarely to pay for an index in every `add`.
    def of_engine(self, engine: Engine) -> list[TextStream]:
        return [stream for stream in self.live.values() if stream.engine == engine]

    def of_router(self, address: str) -> list[TextStream]:
        return [stream for stream in self.live.values() if stream.router == address]

    def add(self, stream: TextStream) -> None:
        self.live[stream.key] = stream
        self._requests.setdefault(stream.key[0], []).append(stream)

    def close(self, stream: TextStream) -> None:
        del self.live[stream.key]
        request = stream.key[0]
        streams = self._requests[request]
        streams.remove(stream)
        if not streams:
            del self._requests[request]
        if not stream.complete:
            self.remember(stream.key, stream.engine)

    def give_up(self, request: int, last: int) -> int:
        """Close all attempts of a request up to `last`, and refuse their rows. Returns how many streams that closed."""
        streams = [stream for stream in self._requests.get(request, ()) if stream.key[1] <= last]
        for stream in streams:
            self.close(stream)
        self._given_up[request] = max(last, self._given_up.pop(request, last))
        if len(self._given_up) > self._capacity:
            self._given_up.popitem(last=False)
        return len(streams)

    def is_late(self, request: int, attempt: int) -> bool:
        """Whether this attempt was given up, or a later one lives."""
        live = self.attempt(request)
        return attempt <= self._given_up.get(request, -1) or (live is not None and live > attempt)

    def remember(self, key: Key, engine: Engine) -> None:
        """Further rows of this sequence are to be ignored."""
        self._closed[key] = engine
        if len(self._closed) > self._capacity:
            self._closed.popitem(last=False)

    def ignores(self, key: Key, end: End | None) -> bool:
        """Whether a row of a sequence that does not live can be ignored. Its end clears the memory of the sequence."""
        if key in self._closed:
            if end is not None:
                del self._closed[key]
            return True
        return self.is_late(*key[:2])

    def forget(self, engine: Engine) -> None:
        """No more rows will come from this engine."""
        for key in [key for key, owner in self._closed.items() if owner == engine]:
            del self._closed[key]
