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
    the smallest fingerprint, so that routers agree. If the operator names a version (`EngineHeartbeat.model_version`),
    only engines of that version count, as long as one of them is usable. A bound request (`RequestState.bound`) stays
    with its model.
    """

    _mixing: bool
    """Every request may go to every engine; a bound one prefers its own model."""
    _log: BoundLogger
    _version: str = ""
    """Of the engines that new requests go to; empty: any."""
    _current: str = ""
    _mixed: bool = False
    _missing: bool = False
    """It was logged that no engine of `_version` takes work."""

    def engines_for(self, request: RequestState, usable: Iterable[EnginePeer]) -> list[EnginePeer]:
        """The usable engines to which the request may go now."""
        engines = list(usable)
        if request.bound:
            return _serving(request.model, engines) or (engines if self._mixing else [])
        named = self._of_version(engines)
        self._watch_version(engines)
        return named if self._mixing else _serving(self._settle(named), named)

    def choose(self, usable: Iterable[EnginePeer]) -> str:
        """Fingerprint of the model of new requests; empty: any model, or there is no engine."""
        engines = Counter(peer.heartbeat.fingerprint for peer in self._of_version(usable) if peer.heartbeat)
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

    def _of_version(self, usable: Iterable[EnginePeer]) -> list[EnginePeer]:
        """The engines of the operator's `serving_version`; all engines if none has it."""
        engines = list(usable)
        if not self._version:
            return engines
        return [peer for peer in engines if self._is_of_version(peer)] or engines

    def _watch_version(self, usable: list[EnginePeer]) -> None:
        """Log once when requests have to go to engines of another version, and once when that is over."""
        if not self._version or not usable:
            return
        missing = not any(map(self._is_of_version, usable))
        if missing and not self._missing:
            self._log.warning("serving_version_missing", version=self._version)
        if self._missing and not missing:
            self._log.info("serving_version_found", version=self._version)
        self._missing = missing

    def _is_of_version(self, peer: EnginePeer) -> bool:
        return peer.heartbeat is not None and peer.heartbeat.model_version == self._version

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
