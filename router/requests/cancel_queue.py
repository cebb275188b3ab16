"""Sends Cancels and Drops to peers whose lanes may be full."""

import asyncio

from router.peers.peers import DetokenizerPeer, EnginePeer
from sluice.wire.requests import Cancel, Drop

CANCEL_RETRY_SECONDS = 0.02


class CancelQueue:
    """Sends Cancels to engines and Drops to detokenizers. While a lane is full, they are queued and retried in order.

    The queue is bounded by the sequences of live requests.
    """

    def __init__(self) -> None:
        self._unsent: dict[EnginePeer | DetokenizerPeer, dict[Cancel | Drop, None]] = {}
        self._retry: asyncio.TimerHandle | None = None

    def send(self, peer: EnginePeer | DetokenizerPeer, cancel: Cancel | Drop) -> None:
        waiting = self._unsent.get(peer)
        # If other messages are waiting, queue behind them to preserve the order.
        if waiting is None and peer.lane.send(cancel):
            return
        self._unsent.setdefault(peer, {})[cancel] = None
        self._schedule()

    def forget(self, peer: EnginePeer | DetokenizerPeer) -> None:
        self._unsent.pop(peer, None)

    def close(self) -> None:
        self._unsent.clear()
        if self._retry is not None:
            self._retry.cancel()

    def _schedule(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(CANCEL_RETRY_SECONDS, self._flush)

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
