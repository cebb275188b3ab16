"""The live streams, and what must be remembered of streams that have ended."""

from collections import OrderedDict

from detok_service.stream import Engine, Key, TextStream
from sluice.wire.rows import End


class StreamTable:
    """The live streams, with at most one attempt per request, and a memory of ended ones.

    A sequence that ended here before the engine's terminal arrived is remembered until that terminal arrives, so that
    its rows are not mistaken for those of a stream whose Open was lost. Attempts that were given up are remembered
    too, since a Drop may overtake the attempt's Open. At most `capacity` of each are remembered.
    """

    def __init__(self, capacity: int) -> None:
        self.live: dict[Key, TextStream] = {}
        """Only this class changes it."""
        self._requests: dict[int, list[TextStream]] = {}
        """Live streams by request."""
        self._closed: OrderedDict[Key, Engine] = OrderedDict()
        """Sequences that have ended here but not yet at their engine."""
        self._given_up: OrderedDict[int, int] = OrderedDict()
        """By request: the last attempt that was given up. Most recently updated requests come last."""
        self._capacity = capacity

    def attempt(self, request: int) -> int | None:
        """The live attempt of this request; None if no attempt is live."""
        streams = self._requests.get(request)
        return streams[0].key[1] if streams else None

    def router(self, request: int, attempt: int) -> str | None:
        """Address of the router that gets the text of this attempt; None if the attempt is not live."""
        streams = self._requests.get(request)
        return streams[0].router if streams and streams[0].key[1] == attempt else None

    # These scan all streams: engines and routers are lost too rarely to justify maintaining an index in every `add`.
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
        """Close all attempts of a request up to `last` and ignore their rows from now on. Returns the number of closed
        streams."""
        streams = [stream for stream in self._requests.get(request, ()) if stream.key[1] <= last]
        for stream in streams:
            self.close(stream)
        self._given_up[request] = max(last, self._given_up.pop(request, last))
        if len(self._given_up) > self._capacity:
            self._given_up.popitem(last=False)
        return len(streams)

    def is_late(self, request: int, attempt: int) -> bool:
        """Whether this attempt was given up, or a later one is live."""
        live = self.attempt(request)
        return attempt <= self._given_up.get(request, -1) or (live is not None and live > attempt)

    def remember(self, key: Key, engine: Engine) -> None:
        """Ignore further rows of this sequence."""
        self._closed[key] = engine
        if len(self._closed) > self._capacity:
            self._closed.popitem(last=False)

    def ignores(self, key: Key, end: End | None) -> bool:
        """Whether a row of a sequence that is not live can be ignored. A row with an end also forgets the sequence."""
        if key in self._closed:
            if end is not None:
                del self._closed[key]
            return True
        return self.is_late(*key[:2])

    def forget(self, engine: Engine) -> None:
        """Forget the closed sequences of an engine that will send no more rows."""
        for key in [key for key, owner in self._closed.items() if owner == engine]:
            del self._closed[key]
