"""Peers that could accept an attempt."""

from collections.abc import Collection
from typing import NamedTuple, TypeVar

from router.peers.peers import DetokenizerPeer, EnginePeer

P = TypeVar("P", EnginePeer, DetokenizerPeer)


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

    def __bool__(self) -> bool:
        return bool(self.engines and self.detokenizers)


def reaches(engine: EnginePeer, detokenizer: DetokenizerPeer) -> bool:
    """Whether the engine can send rows to the detokenizer, according to the engine's latest heartbeat."""
    if engine.heartbeat is None or detokenizer.heartbeat is None:
        return False
    return detokenizer.heartbeat.address not in engine.heartbeat.cut_off


def _without(peers: list[P], avoided: Collection[int]) -> list[P]:
    return [peer for peer in peers if peer.epoch not in avoided] or peers
