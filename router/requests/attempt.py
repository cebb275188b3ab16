"""Attempts: submissions of a request to an engine, and the peers that could accept one."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from router.peers.peers import DetokenizerPeer, EnginePeer
from router.peers.placement import Choice

P = TypeVar("P", EnginePeer, DetokenizerPeer)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One submission of a request to an engine."""

    number: int
    engine: EnginePeer
    detokenizer: DetokenizerPeer
    choice: Choice
    """The load that placement charges for the attempt."""
    tokens_before: int
    """Tokens received from earlier attempts."""
    progress_before: int
    """`RequestLog.progress` reached by earlier attempts."""
    submitted: float = field(default_factory=lambda: time.monotonic())
    """By time.monotonic, like all times here."""
    started: bool = False
    has_tokens: bool = False
    """Whether its first token has arrived, so the prompt has been computed."""
    hands_over: bool = False
    """Whether it ends after its first token and the next attempt continues on another engine."""


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """An attempt that was given up, or has handed over."""

    number: int
    engine: str
    detokenizer: str
    submitted: float
    ended: float
    reason: str
    """An error code, or HANDED_OVER."""
    received_tokens: int
    """Tokens received from this attempt and earlier ones."""


class Candidates(NamedTuple):
    """Each engine can reach at least one of the detokenizers."""

    engines: list[EnginePeer]
    detokenizers: list[DetokenizerPeer]

    @classmethod
    def of(cls, engines: list[EnginePeer], detokenizers: list[DetokenizerPeer]) -> "Candidates":
        return cls([peer for peer in engines if any(reaches(peer, to) for to in detokenizers)], detokenizers)

    def without(self, avoided: Collection[int]) -> "Candidates":
        """The candidates without these epochs. Engines, or detokenizers, are not filtered if none would be left."""
        return Candidates.of(_without(self.engines, avoided), _without(self.detokenizers, avoided))

    @property
    def have_phases(self) -> bool:
        """Whether some engines prefer a part of requests."""
        return any(peer.heartbeat is not None and peer.heartbeat.phase != "both" for peer in self.engines)

    def __bool__(self) -> bool:
        return bool(self.engines and self.detokenizers)


def reaches(engine: EnginePeer, detokenizer: DetokenizerPeer) -> bool:
    """Whether the engine can send rows to the detokenizer, according to the engine's latest heartbeat."""
    if engine.heartbeat is None or detokenizer.heartbeat is None:
        return False
    return detokenizer.heartbeat.address not in engine.heartbeat.cut_off


def _without(peers: list[P], avoided: Collection[int]) -> list[P]:
    return [peer for peer in peers if peer.epoch not in avoided] or peers
