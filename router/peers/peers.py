"""Engines and detokenizers, known by address and alive by heartbeat."""

from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

import zmq

from sluice.ring.heartbeats import DetokenizerHeartbeat, EngineHeartbeat, Epochs, Hello
from sluice.ring.keys import PLAIN, Security
from sluice.ring.lane import Lane
from sluice.ring.timing import HUNG_UP_SECONDS

B = TypeVar("B", EngineHeartbeat, DetokenizerHeartbeat)


class Peer(Generic[B]):
    """One incarnation of the process behind an address, and the lane to it."""

    def __init__(self, address: str, aliases: frozenset[str], lane: Lane) -> None:
        self.address = address
        self.aliases = aliases
        self.lane = lane
        self.greeted = False
        """Its lane took the latest hello."""
        self.unreachable = False
        """The connection to it ended and no other one stands, though its heartbeats may come."""
        self.heartbeat: B | None = None
        self.heard = 0.0
        """When its last heartbeat came, on the monotonic clock."""
        self.alive = False
        self.progress = 0
        """Turns of its loop at the last heartbeat; 0 where it does not tell."""
        self.moved = 0.0
        """When that last grew."""
        self.stalled = False
        """It heartbeats, but its loop stands still."""
        self.dead = False
        """It hung up and fell silent, and its death was reported."""
        self.refuses = False
        """It refused a request because it is in quarantine; until its next heartbeat."""
        self.missed: dict[int, int] = {}
        """Frames that it never got, as far as it told, by the epoch of the lane or of the engine they came from."""

    @property
    def name(self) -> str:
        """Its id, or its address before it was heard."""
        if self.heartbeat is None:
            return self.address
        return self.heartbeat.engine if isinstance(self.heartbeat, EngineHeartbeat) else self.heartbeat.detokenizer

    @property
    def epoch(self) -> int:
        """Of its incarnation; 0 before it was heard."""
        return self.heartbeat.epoch if self.heartbeat else 0

    @property
    def usable(self) -> bool:
        """It takes new work."""
        reachable = self.alive and not self.stalled and not self.unreachable
        return reachable and self.heartbeat is not None and not self.heartbeat.draining

    def silent(self, now: float, timeout: float) -> bool:
        """It has not been heard for the timeout, or for HUNG_UP_SECONDS since it hung up."""
        return now - self.heard > (min(timeout, HUNG_UP_SECONDS) if self.lane.hung_up() else timeout)

    @property
    def quarantined(self) -> bool:
        """It is an engine that runs one request alone."""
        return self.refuses or self.quarantine is not None

    @property
    def quarantine(self) -> int | None:
        """Number of that request."""
        return self.heartbeat.quarantine if isinstance(self.heartbeat, EngineHeartbeat) else None

    @property
    def draining(self) -> bool:
        """It is alive and wants to be rid of its work."""
        return self.alive and self.asked_to_drain

    @property
    def asked_to_drain(self) -> bool:
        """Its latest heartbeat said so, whether or not it is alive."""
        return self.heartbeat is not None and self.heartbeat.draining

    def hear(self, heartbeat: B, now: float) -> None:
        """Take a heartbeat of this incarnation."""
        if isinstance(heartbeat, EngineHeartbeat) and (heartbeat.progress != self.progress or not self.alive):
            self.progress, self.moved, self.stalled = heartbeat.progress, now, False
        self.heartbeat, self.heard, self.alive, self.refuses, self.dead = heartbeat, now, True, False, False

    def news_of_missed(self) -> dict[int, int]:
        """What was missed since the call before, by epoch."""
        missed = self.heartbeat.missed if self.heartbeat else {}
        news = {epoch: count for epoch, count in missed.items() if count > self.missed.get(epoch, 0)}
        self.missed |= news
        return news


EnginePeer = Peer[EngineHeartbeat]
DetokenizerPeer = Peer[DetokenizerHeartbeat]


class Heard(Enum):
    """What a heartbeat told."""

    UNKNOWN = 0
    """It came from nobody that the settings list."""
    STALE = 1
    """From an incarnation that has been replaced."""
    SAME = 2
    """From a peer that was alive."""
    NEW = 3
    """From a peer that was not: for the first time, or again."""


class Peers(Generic[B]):
    """All peers of one kind."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        hello: Callable[[int], Hello],
        timeout: float,
        stall_timeout: float,
        security: Security = PLAIN,
    ) -> None:
        """`hello` for a peer of that epoch; 0 before it was heard. `security` of lanes to this kind."""
        self.unknown = 0
        """Heartbeats of peers that are not configured."""
        self._context = context
        self._hello = hello
        self._timeout = timeout
        self._stall_timeout = stall_timeout
        self._security = security
        self._peers: dict[str, Peer[B]] = {}
        self._incarnations: dict[str, Epochs] = {}
        """By address."""

    @property
    def all(self) -> list[Peer[B]]:
        """Those never heard included."""
        return list(self._peers.values())

    @property
    def heard(self) -> list[Peer[B]]:
        """Those that are alive, draining or not."""
        return [peer for peer in self._peers.values() if peer.alive]

    @property
    def usable(self) -> list[Peer[B]]:
        """Those that take new work."""
        return [peer for peer in self._peers.values() if peer.usable]

    def set_addresses(self, addresses: dict[str, frozenset[str]]) -> list[Peer[B]]:
        """Follow the addresses; the caller closes the lanes of those that went, which it returns.

        A peer that is still alive stays until it falls silent.
        """
        gone = [peer for address, peer in self._peers.items() if address not in addresses and not peer.alive]
        for peer in gone:
            del self._peers[peer.address]
            self._incarnations.pop(peer.address, None)
        for address, aliases in addresses.items():
            if address in self._peers:
                self._peers[address].aliases = aliases
            else:
                self._peers[address] = self._new(address, aliases)
        return gone

    def greet(self) -> None:
        """Say hello to all."""
        for peer in self._peers.values():
            peer.greeted = peer.lane.send(self._hello(peer.epoch))

    def check_lanes(self) -> None:
        """Mark the peers that are unreachable, and say hello to those whose lanes did not take the latest one: a new
        lane is full until it is connected.
        """
        for peer in self._peers.values():
            # While keys change, a lane may say that it hung up although another connection of it stands.
            peer.unreachable = peer.lane.hung_up() and not peer.lane.ready()
            if not peer.greeted and peer.lane.ready():
                peer.greeted = peer.lane.send(self._hello(peer.epoch))

    def hear(self, heartbeat: B, now: float) -> tuple[Heard, Peer[B] | None]:
        """Take a heartbeat: what it told, and the former incarnation of its sender if that is lost now.

        The caller closes the former's lane.
        """
        peer = next((peer for peer in self._peers.values() if heartbeat.address in peer.aliases), None)
        if peer is None:
            self.unknown += 1
            return Heard.UNKNOWN, None
        former, incarnations = None, self._incarnations.get(peer.address, Epochs())
        if incarnations.is_former(heartbeat.epoch):
            return Heard.STALE, None
        if incarnations.replaced_by(heartbeat.epoch):
            former = peer
            peer = self._replace(peer)
        self._incarnations[peer.address] = incarnations.met(heartbeat.epoch)
        heard = Heard.SAME if peer.alive else Heard.NEW
        peer.hear(heartbeat, now)
        return heard, former

    def fall_silent(self, now: float) -> list[Peer[B]]:
        """Mark the peers that have not been heard for too long, and return them."""
        silent = [peer for peer in self._peers.values() if peer.silent(now, self._timeout)]
        lost = [peer for peer in silent if peer.alive]
        for peer in lost:
            peer.alive, peer.dead = False, peer.lane.hung_up() and not peer.asked_to_drain
        return lost

    def stand_still(self, now: float) -> list[Peer[B]]:
        """Mark the peers that heartbeat, but have made no progress for the timeout, and return them."""
        still = [
            peer for peer in self.heard if peer.progress and not peer.stalled and now - peer.moved > self._stall_timeout
        ]
        for peer in still:
            peer.stalled = True
        return still

    def forgive(self, seconds: float) -> None:
        """This process itself stood still for so long: their silence then says nothing."""
        for peer in self._peers.values():
            peer.heard += seconds
            peer.moved += seconds

    def close(self) -> None:
        """Close all lanes."""
        for peer in self._peers.values():
            peer.lane.close(linger=0.2)
        self._peers.clear()

    def _replace(self, former: Peer[B]) -> Peer[B]:
        former.alive = False
        self._peers[former.address] = peer = self._new(former.address, former.aliases)
        return peer

    def _new(self, address: str, aliases: frozenset[str]) -> Peer[B]:
        return Peer(address, aliases, Lane(self._context, address, security=self._security, watched=True))
