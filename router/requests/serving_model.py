"""Decides which engines may serve a request while the engines serve different models, as during a rolling update."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from structlog.stdlib import BoundLogger

from router.errors import RequestError, shown
from router.peers.peers import EnginePeer
from router.requests.request_state import RequestState
from sluice.wire.errors import ErrorCode

SHORT = 8
"""Characters of a fingerprint shown in messages."""
MAX_NAMED = 16
"""Versions listed in a message."""


@dataclass(eq=False)
class ServingModel:
    """A model is identified by its fingerprint of weights, configuration and dtype (`EngineHeartbeat.fingerprint`).

    New requests use the model that most engines serve. On a tie they use the same model as before, and initially the
    one with the smallest fingerprint, so that routers agree. If the operator has set a version
    (`EngineHeartbeat.model_version`), only engines of that version count while at least one of them is usable. A bound
    request (`RequestState.bound`) stays with its model.
    """

    _mixing: bool
    """Whether any request may use any engine; a bound request still prefers its own model."""
    _log: BoundLogger
    version: str = ""
    """Version of the engines that serve new requests; empty for any. Changed by `set_version`."""
    _current: str = ""
    """Fingerprint of the model that the latest requests used."""
    _mixed: bool = False
    """Whether it was logged that engines serve different models."""
    _missing: bool = False
    """Whether it was logged that no engine of `version` accepts work."""

    def set_version(self, version: str, usable: Iterable[EnginePeer]) -> str:
        """Send new requests to engines of this version, or to any engine if it is empty. Returns the former version.

        Raises RequestError MODEL_NOT_FOUND if no usable engine has this version.
        """
        engines = list(usable)
        if version and not _of_version(version, engines):
            raise _unknown_version(version, engines)
        former = self.version
        if version != former:
            self.version, self._missing = version, False
            self._log.info("serving_version_set", version=version, former=former, engines=self.count(engines))
        return former

    def count(self, usable: Iterable[EnginePeer]) -> int:
        """Number of usable engines of `version`, or of all usable engines if it is empty."""
        return len(_of_version(self.version, usable))

    def engines_for(self, request: RequestState, usable: Iterable[EnginePeer]) -> list[EnginePeer]:
        """The usable engines that may serve the request now."""
        engines = list(usable)
        if request.bound:
            return _serving(request.model, engines) or (engines if self._mixing else [])
        targets = self._targets(engines)
        self._watch_version(engines)
        return targets if self._mixing else _serving(self._settle(targets), targets)

    def choose(self, usable: Iterable[EnginePeer]) -> str:
        """Fingerprint of the model for new requests; empty if it may be any model, or if there is no engine."""
        engines = Counter(peer.heartbeat.fingerprint for peer in self._targets(usable) if peer.heartbeat)
        if self._mixing or not engines:
            return ""
        most = max(engines.values())
        first = sorted(model for model, count in engines.items() if count == most)
        return self._current if self._current in first else first[0]

    def check(self, request: RequestState, engines: list[EnginePeer]) -> None:
        """Raises RequestError MODEL_CHANGED if no engine serves the model to which the request is bound.

        While there is a silent or draining engine the request waits, because that engine may return with the model.
        """
        if self._mixing or not request.bound or not engines:
            return
        if all(peer.alive and not peer.draining and not _serves(request.model, peer) for peer in engines):
            began, now = request.model, sorted(engines_by_model(engines))
            short = " or ".join(model[:SHORT] for model in now)
            message = f"the stream began with the model {began[:SHORT]}, but the engines now serve {short}"
            metadata = {"model_fingerprint": began, "served": ",".join(now)}
            raise RequestError(ErrorCode.MODEL_CHANGED, message, metadata=metadata)

    def watch(self, engines: Iterable[EnginePeer]) -> None:
        """Log when the engines start to serve different models, and when they serve a single model again."""
        names = engines_by_model(engines)
        if len(names) > 1 and not self._mixed:
            self._log.warning("models_diverged", engines=names, mixing=self._mixing)
        if len(names) == 1 and self._mixed:
            self._log.warning("models_converged", model=next(iter(names)))
        if names:
            self._mixed = len(names) > 1

    def _targets(self, usable: Iterable[EnginePeer]) -> list[EnginePeer]:
        """The engines of the operator's version; all engines if none has it."""
        engines = list(usable)
        return _of_version(self.version, engines) or engines

    def _watch_version(self, usable: list[EnginePeer]) -> None:
        """Log once when requests must use engines of another version, and once when that is over."""
        if not self.version or not usable:
            return
        missing = not _of_version(self.version, usable)
        if missing and not self._missing:
            self._log.warning("serving_version_missing", version=self.version)
        if self._missing and not missing:
            self._log.info("serving_version_found", version=self.version)
        self._missing = missing

    def _settle(self, engines: list[EnginePeer]) -> str:
        former, chosen = self._current, self.choose(engines)
        if chosen and chosen != former:
            self._current = chosen
            if former:
                self._log.warning("serving_model_changed", model=chosen, former=former)
        return chosen


def engines_by_model(engines: Iterable[EnginePeer]) -> dict[str, list[str]]:
    """Names of the live engines, by fingerprint of their model."""
    names: dict[str, list[str]] = {}
    for peer in engines:
        if peer.alive and peer.heartbeat:
            names.setdefault(peer.heartbeat.fingerprint, []).append(peer.name)
    return names


def _of_version(version: str, engines: Iterable[EnginePeer]) -> list[EnginePeer]:
    """The engines with the label `version`; all engines if it is empty."""
    return [peer for peer in engines if not version or (peer.heartbeat and peer.heartbeat.model_version == version)]


def _unknown_version(version: str, usable: Iterable[EnginePeer]) -> RequestError:
    labels = sorted({peer.heartbeat.model_version for peer in usable if peer.heartbeat} - {""})
    known = ", ".join(map(shown, labels[:MAX_NAMED])) + (", …" if len(labels) > MAX_NAMED else "")
    available = f"must be one of {known}" if known else "but no engine that accepts work has a version"
    message = f"version is {shown(version)}, {available}"
    return RequestError(ErrorCode.MODEL_NOT_FOUND, message, metadata={"version": shown(version), "known": known})


def _serving(model: str, engines: Iterable[EnginePeer]) -> list[EnginePeer]:
    return [peer for peer in engines if _serves(model, peer)]


def _serves(model: str, peer: EnginePeer) -> bool:
    return peer.heartbeat is not None and peer.heartbeat.fingerprint == model
