"""What the engines offer: tokens of context, and what only some requests need."""

from collections.abc import Iterable, Set
from dataclasses import dataclass

from router.peers.peers import EnginePeer, Peers
from sluice.wire.heartbeats import EngineHeartbeat
from sluice.wire.offers import Kind, values_of


def offering(needed: Set[str], engines: Iterable[EnginePeer]) -> list[EnginePeer]:
    """The engines that offer all of this."""
    return [peer for peer in engines if peer.heartbeat and needed <= peer.heartbeat.offers]


@dataclass(frozen=True)
class Offers:
    """Offers of all known engines, including lost ones, because they may return."""

    _engines: Peers[EngineHeartbeat]
    model_context_tokens: int

    @property
    def context_tokens(self) -> int:
        """Maximum number of tokens of prompt plus output: the model's limit, or less if no usable engine can hold that
        many."""
        return self.longest(self._engines.usable)

    def longest(self, engines: Iterable[EnginePeer]) -> int:
        """Like `context_tokens`, for these engines."""
        known = [peer.heartbeat.max_sequence_tokens for peer in engines if peer.heartbeat]
        return min(self.model_context_tokens, max(known)) if known else self.model_context_tokens

    @property
    def known(self) -> frozenset[str] | None:
        """What at least one engine offers. None if no engine has reported yet."""
        heartbeats = [peer.heartbeat for peer in self._engines.all if peer.heartbeat]
        return frozenset().union(*(heartbeat.offers for heartbeat in heartbeats)) if heartbeats else None

    def values(self, kind: Kind) -> list[str]:
        """The values of this kind that at least one engine offers, sorted."""
        return sorted(values_of(kind, self.known or ()))

    def sizes(self, kind: Kind) -> set[int]:
        """The values of a kind whose values are numbers."""
        return set(map(int, self.values(kind)))
