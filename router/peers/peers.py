"""The engines and detokenizers at the configured or resolved addresses. Heartbeats show which of them are alive."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

import msgspec
import zmq

from sluice.host.host_names import HostNames
from sluice.lanes.keys import PLAIN, Security
from sluice.lanes.lane import Lane
from sluice.wire.heartbeats import DetokenizerHeartbeat, EngineHeartbeat, Epochs, Hello
from sluice.wire.timing import DRAIN_SETTLE_SECONDS, HUNG_UP_SECONDS

B = TypeVar("B", EngineHeartbeat, DetokenizerHeartbeat)


@dataclass(eq=False)
class Peer(Generic[B]):
    """One process (one epoch) at an address, and the lane to it."""

    address: str
    aliases: frozenset[str]
    lane: Lane
    challenge: int = 0
    """See `Hello`. It is the same for successive processes at the address."""
    hello_sent: bool = False
    """Whether the lane accepted the latest hello."""
    unreachable: bool = False
    """Whether the lane was disconnected at the latest check. Heartbeats may still arrive."""
    heartbeat: B | None = None
    last_heartbeat_at: float = 0.0
    """By the monotonic clock, like all times here."""
    draining_since: float | None = None
    """Time of the first heartbeat that reported the drain."""
    alive: bool = False
    progress: int = 0
    """Number of iterations of the peer's main loop at its last heartbeat; 0 if the peer does not report it."""
    last_progress_at: float = 0.0
    stalled: bool = False
    """Whether the peer sends heartbeats although its main loop makes no progress."""
    dead: bool = False
    """Whether the peer disconnected and fell silent, and its death was reported."""
    refuses: bool = False
    """Whether the peer rejected a request because it is in quarantine; reset by its next heartbeat."""
    missed: dict[int, int] = field(default_factory=dict)
    """Frames that the peer has reported as missed, by the epoch of the lane or engine that sent them."""

    @property
    def name(self) -> str:
        """The peer's id; before the first heartbeat its address."""
        if self.heartbeat is None:
            return self.address
        return self.heartbeat.engine if isinstance(self.heartbeat, EngineHeartbeat) else self.heartbeat.detokenizer

    @property
    def epoch(self) -> int:
        """The peer's epoch; 0 before the first heartbeat."""
        return self.heartbeat.epoch if self.heartbeat else 0

    @property
    def usable(self) -> bool:
        """Whether the peer accepts new work."""
        reachable = self.alive and not self.stalled and not self.unreachable
        return reachable and self.heartbeat is not None and not self.heartbeat.draining

    def is_silent(self, now: float, timeout: float) -> bool:
        """Whether the peer counts as lost: it has died, or has sent no heartbeat for too long."""
        if self.unreachable:
            refused_at = self.lane.refused_at
            # A heartbeat that came after the refused connection shows that the peer is alive, though its inbox is
            # closed.
            if refused_at is not None and refused_at > self.last_heartbeat_at:
                return True
            timeout = min(timeout, HUNG_UP_SECONDS)
        return now - self.last_heartbeat_at > timeout

    @property
    def quarantined(self) -> bool:
        """Whether the peer is an engine that runs one request alone."""
        return self.refuses or self.quarantine is not None

    @property
    def quarantine(self) -> int | None:
        """Number of the request that the engine runs alone."""
        return self.heartbeat.quarantine if isinstance(self.heartbeat, EngineHeartbeat) else None

    @property
    def draining(self) -> bool:
        """Whether the peer is alive and accepts no new requests."""
        return self.alive and self.asked_to_drain

    @property
    def should_empty(self) -> bool:
        """Whether the peer is draining and its requests should move elsewhere."""
        since = self.draining_since
        return self.draining and since is not None and self.last_heartbeat_at - since >= DRAIN_SETTLE_SECONDS

    @property
    def asked_to_drain(self) -> bool:
        """Whether the latest heartbeat reported a drain, even if the peer is no longer alive."""
        return self.heartbeat is not None and self.heartbeat.draining

    def on_heartbeat(self, heartbeat: B, now: float) -> None:
        """`heartbeat` must be of this peer's epoch."""
        # A peer that returns gets the full stall_timeout again.
        if isinstance(heartbeat, EngineHeartbeat) and (heartbeat.progress != self.progress or not self.alive):
            self.progress, self.last_progress_at, self.stalled = heartbeat.progress, now, False
        self.heartbeat, self.last_heartbeat_at, self.alive = heartbeat, now, True
        if not heartbeat.draining:
            self.draining_since = None
        elif self.draining_since is None:
            self.draining_since = now
        self.refuses = self.dead = False

    def newly_missed(self) -> dict[int, int]:
        """Counts of missed frames that have grown since the last call, by epoch."""
        missed = self.heartbeat.missed if self.heartbeat else {}
        grown = {epoch: count for epoch, count in missed.items() if count > self.missed.get(epoch, 0)}
        # Only what the peer still reports, so that its reports do not fill the memory.
        self.missed = missed
        return grown


EnginePeer = Peer[EngineHeartbeat]
DetokenizerPeer = Peer[DetokenizerHeartbeat]


class HeartbeatSource(Enum):
    """The state of a heartbeat's sender before the heartbeat."""

    UNKNOWN = 0
    """The address is not configured."""
    FORGED = 1
    """The sender does not receive at this address, see `Hello.challenge`."""
    STALE = 2
    """The epoch was replaced by a newer one."""
    ALIVE = 3
    """The peer was alive."""
    NEW = 4
    """The peer was not alive: this is its first heartbeat, or the first one after it was lost."""


@dataclass(eq=False)
class Peers(Generic[B]):
    _context: "zmq.Context[zmq.Socket[bytes]]"
    _hello: Callable[[int], Hello]
    """Makes the hello for a peer by its epoch (0 before its first heartbeat)."""
    _timeout: float
    _stall_timeout: float
    _security: Security = PLAIN
    unknown: int = 0
    """Heartbeats from addresses that are not configured."""
    _peers: dict[str, Peer[B]] = field(default_factory=dict)
    """By address."""
    _epochs: dict[str, Epochs] = field(default_factory=dict)
    """By address."""
    _names: HostNames = field(default_factory=HostNames)

    @property
    def all(self) -> list[Peer[B]]:
        """All peers, including those that have not sent a heartbeat yet."""
        return list(self._peers.values())

    @property
    def alive(self) -> list[Peer[B]]:
        """Live peers, including draining ones."""
        return [peer for peer in self._peers.values() if peer.alive]

    @property
    def usable(self) -> list[Peer[B]]:
        return [peer for peer in self._peers.values() if peer.usable]

    def set_addresses(self, addresses: dict[str, frozenset[str]]) -> list[Peer[B]]:
        """Add and remove peers. Returns the removed ones, whose lanes the caller must close.

        A peer whose address was removed is kept while it is alive.
        """
        removed = [peer for address, peer in self._peers.items() if address not in addresses and not peer.alive]
        for peer in removed:
            del self._peers[peer.address]
            self._epochs.pop(peer.address, None)
        for address, aliases in addresses.items():
            if address in self._peers:
                self._peers[address].aliases = aliases
            else:
                self._peers[address] = self._new(address, aliases)
        return removed

    def send_hellos(self) -> None:
        for peer in self._peers.values():
            self._greet(peer)

    def check_lanes(self) -> None:
        """Update `unreachable`, and repeat rejected hellos: a new lane accepts nothing until it is connected."""
        for peer in self._peers.values():
            # During key rotation, a lane may report a hang-up although its second connection works.
            peer.unreachable = peer.lane.hung_up() and not peer.lane.ready()
            if not peer.hello_sent and peer.lane.ready():
                self._greet(peer)

    def on_heartbeat(self, heartbeat: B, now: float) -> tuple[HeartbeatSource, Peer[B] | None]:
        """The sender's former state, and the replaced peer if the heartbeat is from a new process; the caller must
        close the lane of the replaced peer."""
        peer = next((peer for peer in self._peers.values() if heartbeat.address in peer.aliases), None)
        if peer is None:
            self.unknown += 1
            return HeartbeatSource.UNKNOWN, None
        if heartbeat.challenge != peer.challenge:
            # After a restart of this router, heartbeats that answer its predecessor arrive before others.
            return HeartbeatSource.FORGED if peer.alive else HeartbeatSource.STALE, None
        former, epochs = None, self._epochs.get(peer.address, Epochs())
        if epochs.is_former(heartbeat.epoch):
            return HeartbeatSource.STALE, None
        if epochs.replaced_by(heartbeat.epoch):
            former, peer = peer, self._new(peer.address, peer.aliases, peer.challenge)
            former.alive = False
            self._peers[peer.address] = peer
        self._epochs[peer.address] = epochs.after(heartbeat.epoch)
        source = HeartbeatSource.ALIVE if peer.alive else HeartbeatSource.NEW
        peer.on_heartbeat(heartbeat, now)
        return source, former

    def mark_silent(self, now: float) -> list[Peer[B]]:
        """Mark peers whose heartbeats have stopped as lost, and return them."""
        silent = [peer for peer in self._peers.values() if peer.is_silent(now, self._timeout)]
        lost = [peer for peer in silent if peer.alive]
        for peer in lost:
            peer.alive, peer.dead = False, peer.unreachable and not peer.asked_to_drain
        return lost

    def mark_stalled(self, now: float) -> list[Peer[B]]:
        """Mark peers that have made no progress for `stall_timeout` as stalled, and return them."""
        running = [peer for peer in self.alive if peer.progress and not peer.stalled]
        stalled = [peer for peer in running if now - peer.last_progress_at > self._stall_timeout]
        for peer in stalled:
            peer.stalled = True
        return stalled

    def exclude_pause(self, seconds: float) -> None:
        """Do not count a pause of this process as silence of the peers."""
        for peer in self._peers.values():
            peer.last_heartbeat_at += seconds
            peer.last_progress_at += seconds

    def close(self) -> None:
        for peer in self._peers.values():
            peer.lane.close(linger=0.2)
        self._peers.clear()

    def _greet(self, peer: Peer[B]) -> None:
        hello = msgspec.structs.replace(self._hello(peer.epoch), challenge=peer.challenge)
        peer.hello_sent = peer.lane.send(hello)

    def _new(self, address: str, aliases: frozenset[str], challenge: int | None = None) -> Peer[B]:
        lane = Lane(self._context, address, security=self._security, watched=True, names=self._names)
        return Peer(address, aliases, lane, secrets.randbits(63) if challenge is None else challenge)
