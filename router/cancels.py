"""Cancels on their way to an engine. None is lost: where the lane is full it is kept and tried again."""

import asyncio

from router.peers import DetokenizerPeer, EnginePeer
from sluice.ring.wire import Cancel

RETRY_SECONDS = 0.02


class Cancels:
    """Bounded by the sequences of live requests: each has at most one."""

    def __init__(self) -> None:
        self._unsent: dict[EnginePeer, dict[tuple[int, int | None], Cancel]] = {}
        self._retry: asyncio.TimerHandle | None = None

    def send(self, engine: EnginePeer, cancel: Cancel) -> None:
        """Send it now, or as soon as the lane takes it; the order is kept."""
        waiting = self._unsent.get(engine)
        if waiting is None and engine.lane.send(cancel):
            return
        self._unsent.setdefault(engine, {})[cancel.request, cancel.sequence] = cancel
        self._schedule()

    def unsent(self, engine: EnginePeer) -> int:
        """How many wait for this engine's lane."""
        return len(self._unsent.get(engine, ()))

    def forget(self, engine: EnginePeer | DetokenizerPeer) -> None:
        """This incarnation has gone, and what it was doing with it."""
        self._unsent = {peer: waiting for peer, waiting in self._unsent.items() if peer is not engine}

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
        for engine, waiting in list(self._unsent.items()):
            for key, cancel in list(waiting.items()):
                if not engine.lane.send(cancel):
                    break
                del waiting[key]
            if not waiting:
                del self._unsent[engine]
        if self._unsent:
            self._schedule()
