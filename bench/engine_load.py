"""Loads that only the engine alone understands: its settings, late arrivals, retention, time that passes."""

from collections.abc import Sequence
from typing import Any

import msgspec

from bench.load import Ask, Load, Run, System
from sluice.ring.params import RetentionParams


class EngineAsk(Ask, frozen=True):
    """One request of the engine."""

    arrives: float | None = None
    """So many seconds after all that were there from the start have had a token. None: there from the start."""
    passed: float = 0.0
    """Seconds that have gone by on the engine's clock before it comes, and that nobody waited for."""
    retention: RetentionParams = RetentionParams()
    ends_after: int | None = None
    """Output tokens after which it is cancelled, as for a stop string. None: it generates max_tokens."""


class EngineLoad(Load, frozen=True):
    """Requests, and the engine that they are for."""

    asks: Sequence[EngineAsk]
    settings: dict[str, Any] | None = None
    """Given, an engine of these settings is put together for this load, with an empty cache. It uses the memory of the
    process's own, all or less."""

    @property
    def tokens(self) -> int:
        """Output tokens wanted."""
        return sum(ask.max_tokens if ask.ends_after is None else ask.ends_after for ask in self.asks)


class EngineRun(Run, frozen=True):
    """What the engine made of a load."""

    steps: int = 0
    """That computed something."""


class Configured:
    """The engine under certain settings, by a name for them."""

    def __init__(self, name: str, engine: System[EngineRun], settings: dict[str, Any]) -> None:
        self.name = name
        self._engine = engine
        self._settings = settings

    def run(self, load: Load) -> EngineRun:
        """Serve an EngineLoad, by a new engine."""
        return self._engine.run(msgspec.structs.replace(load, settings=self._settings))
