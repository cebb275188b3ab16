"""Cancels to engines, drops to detokenizers. None is lost: where the lane is full it is kept and tried again."""

import asyncio

from router.peers.peers import DetokenizerPeer, EnginePeer
from sluice.ring.wire import Cancel, Drop

RETRY_SECONDS = 0.02


class Cancels:
    """Bounded by the sequences of live requests: each attempt at one has at most one cancel per peer."""

    def __init__(self) -> None:
        self._unsent: dict[EnginePeer | DetokenizerPeer, dict[Cancel | Drop, None]] = {}
        self._retry: asyncio.TimerHandle | None = None

    def send(self, peer: EnginePeer | DetokenizerPeer, cancel: Cancel | Drop) -> None:
        """Send it now, or as soon as the lane takes it; the order is kept."""
        waiting = self._unsent.get(peer)
        if waiting is None and peer.lane.send(cancel):
            return
        self._unsent.setdefault(peer, {})[cancel] = None
        self._schedule()

    def unsent(self, peer: EnginePeer | DetokenizerPeer) -> int:
        """How many wait for this peer's lane."""
        return len(self._unsent.get(peer, ()))

    def forget(self, peer: EnginePeer | DetokenizerPeer) -> None:
        """This incarnation has gone, and what it was doing with it."""
        self._unsent.pop(peer, None)

    def close(self) -> None:
        """Try no more."""
        self._unsent.clear()
        if self._retry is not None:
            self._retry.cancel()

    def _schedule(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._flush)

    def _flush(self) -> None:
        self._retry = None
        for peer, waiting in list(self._unsent.items()):
            for cancel in list(waiting):
                if not peer.lane.send(cancel):
                    break
                del waiting[cancel]
            if not waiting:
                del self._unsent[peer]
        if self._unsent:
            self._schedule()
