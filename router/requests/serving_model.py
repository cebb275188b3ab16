"""Which engines a request may go to where the engines of a ring serve different models, as in a rolling update."""

from collections import Counter
from collections.abc import Iterable

import structlog

from router.errors import RequestError
from router.peers.peers import EnginePeer
from router.requests.registry import RequestState
from sluice.ring.errors import ErrorCode

SHORT = 8
"""Characters of a fingerprint in messages."""


class ServingModel:
    """A model is known by its fingerprint: weights, configuration and dtype (`EngineHeartbeat.fingerprint`).

    New requests go to the model that most engines serve; on a tie to the one that they went to before, and at first to
    the smallest fingerprint, so that routers agree. A bound request (`RequestState.bound`) stays with its model.
    """

    def __init__(self, mixing: bool, logger: structlog.stdlib.BoundLogger) -> None:
        """`mixing`: every request may go to every engine; a bound one prefers its own model."""
        self._mixing = mixing
        self._logger = logger
        self._current = ""
        self._mixed = False

    def engines_for(self, live: RequestState, usable: Iterable[EnginePeer]) -> list[EnginePeer]:
        """Those of the usable engines to which it may go now."""
        engines = list(usable)
        if self._mixing:
            return (live.bound and _serving(live.model, engines)) or engines
        return _serving(live.model if live.bound else self._settle(engines), engines)

    def choose(self, usable: Iterable[EnginePeer]) -> str:
        """The model of new requests; empty: any, or there is no engine."""
        engines = Counter(peer.heartbeat.fingerprint for peer in usable if peer.heartbeat)
        if self._mixing or not engines:
            return ""
        most = max(engines.values())
        first = sorted(model for model, count in engines.items() if count == most)
        return self._current if self._current in first else first[0]

    def check(self, live: RequestState, engines: list[EnginePeer]) -> None:
        """Raises RequestError MODEL_CHANGED where a request is bound to a model that none of all engines serves.

        One that is not heard, or drains, may come back with it.
        """
        if self._mixing or not live.bound or not engines:
            return
        if all(peer.alive and not peer.draining and not _serves(live.model, peer) for peer in engines):
            raise _changed(live.model, sorted(engines_by_model(engines)))

    def watch(self, engines: Iterable[EnginePeer]) -> None:
        """Log when the ring becomes mixed, and when it no longer is."""
        found = engines_by_model(engines)
        if len(found) > 1 and not self._mixed:
            self._logger.warning("engines serve different models", engines=found, mixing=self._mixing)
        if len(found) == 1 and self._mixed:
            self._logger.warning("engines serve one model again", model=next(iter(found)))
        if found:
            self._mixed = len(found) > 1

    def _settle(self, engines: list[EnginePeer]) -> str:
        former, chosen = self._current, self.choose(engines)
        if chosen and chosen != former:
            self._current = chosen
            if former:
                self._logger.warning("new requests go to another model", model=chosen, former=former)
        return chosen


def engines_by_model(engines: Iterable[EnginePeer]) -> dict[str, list[str]]:
    """Names of the engines that are alive, by fingerprint."""
    found: dict[str, list[str]] = {}
    for peer in engines:
        if peer.alive and peer.heartbeat:
            found.setdefault(peer.heartbeat.fingerprint, []).append(peer.name)
    return found


def _serving(model: str, engines: Iterable[EnginePeer]) -> list[EnginePeer]:
    return [peer for peer in engines if _serves(model, peer)]


def _serves(model: str, peer: EnginePeer) -> bool:
    return peer.heartbeat is not None and peer.heartbeat.fingerprint == model


def _changed(began: str, now: list[str]) -> RequestError:
    others = " or ".join(model[:SHORT] for model in now)
    return RequestError(
        ErrorCode.MODEL_CHANGED,
        f"the stream began with the model {began[:SHORT]} and cannot go on: the engines serve {others} now",
        metadata={"model_fingerprint": began, "served": ",".join(now)},
    )
