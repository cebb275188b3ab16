"""Calls of a method on the ranks of all engines: sent once over the ring, answered on the side lane."""

import asyncio
import secrets
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from router.errors import RequestError
from router.peers.membership import Membership
from router.peers.peers import EnginePeer
from sluice.ring.calls import Call, CallAnswer, MethodCall, RankAnswer, failed
from sluice.ring.errors import ErrorCode

POLL_SECONDS = 0.05
"""Between two looks at whether an engine is alive, or its lane has room."""


class EngineAnswers(NamedTuple):
    engine: str
    answers: list[RankAnswer]
    """By rank; or one error of the whole engine."""


class EngineCalls:
    def __init__(self, membership: Membership, address: str, log: BoundLogger) -> None:
        """`address`: of this router's inbox."""
        self._membership = membership
        self._address = address
        self._log = log
        self._pending: dict[int, asyncio.Future[CallAnswer]] = {}

    def on_answer(self, answer: CallAnswer) -> None:
        pending = self._pending.get(answer.number)
        if pending is not None and not pending.done():
            pending.set_result(answer)
        else:
            self._log.debug("late_call_answer", engine_epoch=answer.engine_epoch)

    async def call(self, call: MethodCall, seconds: float) -> list[EngineAnswers]:
        """By engine. An engine that is lost or late answers with an error. Raises RequestError NO_ENGINE."""
        engines = sorted(self._membership.engines.alive, key=lambda engine: engine.name)
        if not engines:
            raise RequestError(ErrorCode.NO_ENGINE, "no engine is known to be alive")
        return await asyncio.gather(*(self._call(engine, call, seconds) for engine in engines))

    async def _call(self, engine: EnginePeer, call: MethodCall, seconds: float) -> EngineAnswers:
        name, number = engine.name, secrets.randbits(63)
        answered = self._pending[number] = asyncio.get_running_loop().create_future()
        message, sent = Call(engine.epoch, number, self._address, call), False
        try:
            async with asyncio.timeout(seconds):
                while engine.alive and not sent:
                    sent = engine.lane.send(message) or await asyncio.sleep(POLL_SECONDS, False)
                while engine.alive and not answered.done():
                    await asyncio.wait({answered}, timeout=POLL_SECONDS)
            problem = "the engine was lost"
        except TimeoutError:
            problem = f"no answer within {seconds:g} s"
        finally:
            del self._pending[number]
        if answered.done():
            return EngineAnswers(name, answered.result().answers)
        outcome = "it may have run the method" if sent else "the method was not sent to it"
        return EngineAnswers(name, [failed(None, f"{problem}; {outcome}")])
