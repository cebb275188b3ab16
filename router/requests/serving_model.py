"""Which engines a request may go to while the engines of a ring serve different models, as in a rolling update."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from structlog.stdlib import BoundLogger

from router.errors import RequestError
from router.peers.peers import EnginePeer
from router.requests.request_state import RequestState
from sluice.ring.errors import ErrorCode

SHORT = 8
"""Characters of a fingerprint in messages."""


@dataclass(eq=False)
class ServingModel:
    """A model is known by its fingerprint: weights, configuration and dtype (`EngineHeartbeat.fingerprint`).

    New requests go to the model that most engines serve; on a tie to the one that they went to before, and at first to
    the smallest fingerprint, so that routers agree. A bound request (`RequestState.bound`) stays with its model.
    """

    _mixing: bool
    """Every request may go to every engine; a bound one prefers its own model."""
    _log: BoundLogger
    _current: str = ""
    _mixed: bool = False

    def engines_for(self, request: RequestState, usable: Iterable[EnginePeer]) -> list[EnginePeer]:
        """The usable engines to which the request may go now."""
        engines = list(usable)
        if self._mixing:
            return (request.bound and _serving(request.model, engines)) or engines
        return _serving(request.model if request.bound else self._settle(engines), engines)

    def choose(self, usable: Iterable[EnginePeer]) -> str:
        """Fingerprint of the model of new requests; empty: any model, or there is no engine."""
        engines = Counter(peer.heartbeat.fingerprint for peer in usable if peer.heartbeat)
        if self._mixing or not engines:
            return ""
        most = max(engines.values())
        first = sorted(model for model, count in engines.items() if count == most)
        return self._current if self._current in first else first[0]

    def check(self, request: RequestState, engines: list[EnginePeer]) -> None:
        """Raises RequestError MODEL_CHANGED if no engine serves the model to which the request is bound.

        A silent or draining engine may come back with that model, so while there is one the request waits.
        """
        if self._mixing or not request.bound or not engines:
            return
        if all(peer.alive and not peer.draining and not _serves(request.model, peer) for peer in engines):
            began, now = request.model, sorted(engines_by_model(engines))
            short = " or ".join(model[:SHORT] for model in now)
            message = f"the stream began with the model {began[:SHORT]} and cannot go on: the engines serve {short} now"
            metadata = {"model_fingerprint": began, "served": ",".join(now)}
            raise RequestError(ErrorCode.MODEL_CHANGED, message, metadata=metadata)

    def watch(self, engines: Iterable[EnginePeer]) -> None:
        """Log when the engines begin to serve different models, and when they serve one again."""
        found = engines_by_model(engines)
        if len(found) > 1 and not self._mixed:
            self._log.warning("models_diverged", engines=found, mixing=self._mixing)
        if len(found) == 1 and self._mixed:
            self._log.warning("models_converged", model=next(iter(found)))
        if found:
            self._mixed = len(found) > 1

    def _settle(self, engines: list[EnginePeer]) -> str:
        former, chosen = self._current, self.choose(engines)
        if chosen and chosen != former:
            self._current = chosen
            if former:
                self._log.warning("serving_model_changed", model=chosen, former=former)
        return chosen


def engines_by_model(engines: Iterable[EnginePeer]) -> dict[str, list[str]]:
    """Names of the live engines, by fingerprint of their model."""
    found: dict[str, list[str]] = {}
    for peer in engines:
        if peer.alive and peer.heartbeat:
            found.setdefault(peer.heartbeat.fingerprint, []).append(peer.name)
    return found


def _serving(model: str, engines: Iterable[EnginePeer]) -> list[EnginePeer]:
    return [peer for peer in engines if _serves(model, peer)]


def _serves(model: str, peer: EnginePeer) -> bool:
    return peer.heartbeat is not None and peer.heartbeat.fingerprint == model
