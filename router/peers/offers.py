"""What the engines offer, including their context length, and what a request needs from them."""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from router.errors import Reason, RequestError, Violation, shown
from router.peers.peers import EnginePeer, Peers
from sluice.wire.heartbeats import EngineHeartbeat
from sluice.wire.offers import LORA, Kind, offer, values_of


def offering(needed: Set[str], engines: Iterable[EnginePeer]) -> list[EnginePeer]:
    """The engines that offer all that is needed."""
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


class Need(NamedTuple):
    """One offer that a request's engine must make."""

    kind: Kind
    value: str
    noun: str
    """What it is, in the plural, for the error if no engine that offers it is available."""
    shown: str
    """Which one it is, for the same error. Empty if the noun says it."""
    refuse: Callable[[Sequence[str]], Violation]
    """The violation if no known engine offers it, given the values of this kind that engines do offer, sorted."""

    @property
    def offer(self) -> str:
        return LORA if self.kind == LORA else offer(self.kind, self.value)


def named_need(kind: Kind, name: str, field: str, noun: str, missing: str = "") -> Need:
    """The need for something that engines know by name. `missing`: what to say that no engine has, if none has
    any of this kind; empty: `noun`."""

    def refuse(names: Sequence[str]) -> Violation:
        problem = f"must be one of: {', '.join(names)}" if names else f"but no engine has {missing or noun}"
        return Violation(field, f"is {shown(name)}, {problem}", reason=Reason.UNKNOWN_VALUE)

    return Need(kind, name, noun, shown(name), refuse)


def check_needs(needs: Iterable[Need], known: Set[str] | None) -> None:
    """Raises RequestError with everything that no engine offers. `known`: what engines offer; None if no engine has
    reported yet."""
    if known is None:
        return
    unmet = [need for need in needs if need.offer not in known]
    if unmet:
        raise RequestError.invalid([need.refuse(sorted(values_of(need.kind, known))) for need in unmet])


def described(needs: Iterable[Need]) -> str:
    """The needs in an error message."""
    by_noun = groupby(needs, key=lambda need: need.noun)
    return " and ".join(f"{noun} {', '.join(need.shown for need in alike)}".rstrip() for noun, alike in by_noun)
