"""Dropping the prefix cache of every engine: asked for on the ring, answered by the heartbeats."""

import asyncio
import secrets

from router.errors import RequestError
from router.peers.membership import Membership
from router.peers.peers import EnginePeer
from router.peers.placement import Placement
from sluice.ring.errors import ErrorCode
from sluice.ring.wire import Flush

ANSWER_SECONDS = 5.0
POLL_SECONDS = 0.05


class CacheFlush:
    """Asks all engines that are alive."""

    def __init__(self, members: Membership, placement: Placement) -> None:
        self._members = members
        self._placement = placement

    async def run(self) -> int:
        """Blocks freed on all engines. Raises RequestError NO_ENGINE, ENGINE_LOST where one does not answer in time."""
        engines = self._members.engines.alive
        if not engines:
            raise RequestError(ErrorCode.NO_ENGINE, "no engine is available")
        number = secrets.randbits(63)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return sum(await asyncio.gather(*(self._flush(engine, number) for engine in engines)))
        except TimeoutError:
            raise RequestError(ErrorCode.ENGINE_LOST, f"an engine did not answer for {ANSWER_SECONDS:g} s") from None

    async def _flush(self, engine: EnginePeer, number: int) -> int:
        while engine.alive and not engine.lane.send(Flush(engine.epoch, number)):
            await asyncio.sleep(POLL_SECONDS)
        self._placement.forget_cache(engine.epoch)
        while engine.alive:
            blocks = dict(engine.heartbeat.flushes if engine.heartbeat else ()).get(number)
            if blocks is not None:
                return blocks
            await asyncio.sleep(POLL_SECONDS)
        raise RequestError(ErrorCode.ENGINE_LOST, f"the engine {engine.name} was lost")
