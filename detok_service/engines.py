"""Engines as a detokenizer hears them: by name and epoch."""

from collections import OrderedDict

from detok_service.stream import Engine
from sluice.ring.timing import DOUBTFUL_ENGINE_SILENCE_SECONDS, ENGINE_SILENCE_SECONDS

MAX_ENGINES = 4096
"""Those unheard for longest are forgotten beyond this."""
MAX_MISSED = 1 << 62
"""What is counted stays within what the wire can carry."""


class Engines:
    """Who was heard when, and what of theirs never came."""

    def __init__(self) -> None:
        self._heard: OrderedDict[Engine, float] = OrderedDict()
        """Longest unheard first."""
        self._latest: dict[str, int] = {}
        """By name, the epoch that was met last."""
        self._missed: dict[int, int] = {}
        self._suspected = -1.0
        """Until when those heard last may be dead, and a router's word of it have been lost."""

    @property
    def missed(self) -> dict[int, int]:
        """See `DetokenizerHeartbeat.missed`."""
        return dict(self._missed)

    @property
    def epochs(self) -> set[int]:
        """Of those that were heard."""
        return {epoch for _, epoch in self._heard}

    def hear(self, engine: Engine, now: float) -> Engine | None:
        """A sign of life. Where it is the first of an engine, the incarnation that this one takes the place of.

        Late frames of a former incarnation may come after the first of a new one: they replace nobody.
        """
        met = engine in self._heard
        self._heard[engine] = now
        self._heard.move_to_end(engine)
        if met:
            return None
        name, epoch = engine
        former = self._latest.get(name)
        self._latest[name] = epoch
        if len(self._heard) > MAX_ENGINES:
            self.forget(next(iter(self._heard)))
        return None if former is None else (name, former)

    def miss(self, engine: Engine, frames: int) -> None:
        """So many frames of an engine that was heard never came."""
        _, epoch = engine
        self._missed[epoch] = min(self._missed.get(epoch, 0) + frames, MAX_MISSED)

    def suspect(self, now: float) -> None:
        """Something of a router's never came: those that are not heard any more are taken for gone sooner."""
        self._suspected = now

    def silent(self, now: float) -> list[Engine]:
        """Those that are gone."""
        return [engine for engine, heard in self._heard.items() if now - heard > self._bound(engine, heard)]

    def forget(self, engine: Engine) -> None:
        """Drop what is known of an engine."""
        name, epoch = engine
        del self._heard[engine]
        self._missed.pop(epoch, None)
        if self._latest.get(name) == epoch:
            del self._latest[name]

    def _bound(self, engine: Engine, heard: float) -> float:
        name, epoch = engine
        likely = self._latest.get(name) == epoch and heard > self._suspected
        return ENGINE_SILENCE_SECONDS if likely else DOUBTFUL_ENGINE_SILENCE_SECONDS
