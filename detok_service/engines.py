"""Engines that send to this detokenizer, by name and epoch: when each was last heard, and how many frames it lost."""

from collections import OrderedDict

from detok_service.stream import Engine
from sluice.ring.timing import DOUBTFUL_ENGINE_SILENCE_SECONDS, ENGINE_SILENCE_SECONDS

MAX_ENGINES = 4096
"""Beyond this many, those silent for longest are forgotten."""
MAX_MISSED = 1 << 62
"""Counts stay within what the wire can carry."""


class Engines:
    def __init__(self) -> None:
        self._heard: OrderedDict[Engine, float] = OrderedDict()
        """Time of the latest frame; the longest silent first."""
        self._latest: dict[str, int] = {}
        """The newest epoch by name."""
        self._missed: dict[int, int] = {}
        self._router_gap_at = -1.0

    @property
    def missed(self) -> dict[int, int]:
        """See `DetokenizerHeartbeat.missed`."""
        return dict(self._missed)

    @property
    def epochs(self) -> set[int]:
        return {epoch for _, epoch in self._heard}

    def on_frame(self, engine: Engine, now: float) -> Engine | None:
        """A frame came. If it is the first of a new process, returns the engine that this one replaced.

        Late frames of a former epoch may come after the first of the new one: they replace nothing.
        """
        known = engine in self._heard
        self._heard[engine] = now
        self._heard.move_to_end(engine)
        if known:
            return None
        name, epoch = engine
        former = self._latest.get(name)
        self._latest[name] = epoch
        if len(self._heard) > MAX_ENGINES:
            self.forget(next(iter(self._heard)))
        return None if former is None else (name, former)

    def count_missed(self, engine: Engine, frames: int) -> None:
        """Frames of a known engine were lost."""
        _, epoch = engine
        self._missed[epoch] = min(self._missed.get(epoch, 0) + frames, MAX_MISSED)

    def on_router_gap(self, now: float) -> None:
        """Frames of a router were lost, perhaps a Drop: an engine that stays silent from now on is lost sooner."""
        self._router_gap_at = now

    def silent(self, now: float) -> list[Engine]:
        """Engines that have been silent for too long."""
        return [engine for engine, heard in self._heard.items() if now - heard > self._patience(engine, heard)]

    def forget(self, engine: Engine) -> None:
        name, epoch = engine
        del self._heard[engine]
        self._missed.pop(epoch, None)
        if self._latest.get(name) == epoch:
            del self._latest[name]

    def _patience(self, engine: Engine, heard: float) -> float:
        name, epoch = engine
        trusted = self._latest.get(name) == epoch and heard > self._router_gap_at
        return ENGINE_SILENCE_SECONDS if trusted else DOUBTFUL_ENGINE_SILENCE_SECONDS
