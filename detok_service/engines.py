"""The engines that send to this detokenizer: their latest frames, lost frames, restarts and silence."""

from collections import OrderedDict

from detok_service.stream import Engine
from sluice.wire.timing import DOUBTFUL_ENGINE_SILENCE_SECONDS, ENGINE_SILENCE_SECONDS

MAX_ENGINES = 4096
"""Names and epochs come from the network: without a limit, forged ones would fill the memory."""
MAX_MISSED = 1 << 62
"""Largest count of lost frames that a heartbeat can carry."""


class Engines:
    """When the latest frame of each engine arrived, and how many frames were lost."""

    def __init__(self) -> None:
        self._last_frame_at: OrderedDict[Engine, float] = OrderedDict()
        """Arrival time of each engine's latest frame, oldest first."""
        self._latest: dict[str, int] = {}
        """Newest epoch by engine name."""
        self.missed: dict[int, int] = {}
        """Lost frames by epoch, as in `DetokenizerHeartbeat.missed`."""
        self._router_gap_at = -1.0

    @property
    def epochs(self) -> set[int]:
        return {epoch for _, epoch in self._last_frame_at}

    def on_frame(self, engine: Engine, now: float) -> Engine | None:
        """Record a frame. If it is the first of a new process, return the engine that this process replaced."""
        known = engine in self._last_frame_at
        self._last_frame_at[engine] = now
        self._last_frame_at.move_to_end(engine)
        # Late frames of a former epoch return here, so they do not count as a restart.
        if known:
            return None
        name, epoch = engine
        former = self._latest.get(name)
        self._latest[name] = epoch
        if len(self._last_frame_at) > MAX_ENGINES:
            self.forget(next(iter(self._last_frame_at)))
        return None if former is None else (name, former)

    def count_missed(self, engine: Engine, frames: int) -> None:
        _, epoch = engine
        self.missed[epoch] = min(self.missed.get(epoch, 0) + frames, MAX_MISSED)

    def on_router_gap(self, now: float) -> None:
        """Frames of a router were lost, perhaps a Drop. Engines that stay silent from now on count as lost sooner."""
        self._router_gap_at = now

    def exclude_pause(self, seconds: float, now: float) -> None:
        """Do not count a pause of this process, up to now, as silence of the engines."""
        for engine, at in self._last_frame_at.items():
            self._last_frame_at[engine] = min(now, at + seconds)
        self._router_gap_at = min(now, self._router_gap_at + seconds)

    def silent(self, now: float) -> list[Engine]:
        return [engine for engine, at in self._last_frame_at.items() if now - at > self._patience(engine, at)]

    def forget(self, engine: Engine) -> None:
        name, epoch = engine
        del self._last_frame_at[engine]
        self.missed.pop(epoch, None)
        if self._latest.get(name) == epoch:
            del self._latest[name]

    def _patience(self, engine: Engine, last_frame_at: float) -> float:
        name, epoch = engine
        trusted = self._latest.get(name) == epoch and last_frame_at > self._router_gap_at
        return ENGINE_SILENCE_SECONDS if trusted else DOUBTFUL_ENGINE_SILENCE_SECONDS
