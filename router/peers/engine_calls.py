"""Calls of a method on the ranks of all engines: sent once over the ring, answered on the side lane."""

import asyncio
import secrets
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from router.errors import RequestError
from router.peers.membership import Membership
from router.peers.peers import DetokenizerPeer, EnginePeer
from sluice.ring.calls import Call, CallAnswer, MethodCall, RankAnswer, failed
from sluice.ring.errors import ErrorCode

FULL_LANE_RETRY_SECONDS = 0.05
"""A lane gives no sign when it has room again."""


class EngineAnswers(NamedTuple):
    engine: str
    answers: list[RankAnswer]
    """By rank; or one error of the whole engine."""


class _Pending(NamedTuple):
    engine: EnginePeer
    answered: "asyncio.Future[CallAnswer | None]"
    """None: the engine was lost."""


class EngineCalls:
    def __init__(self, membership: Membership, address: str, log: BoundLogger) -> None:
        """`address`: of this router's inbox."""
        self._membership = membership
        self._address = address
        self._log = log
        self._pending: dict[int, _Pending] = {}

    def on_peer_lost(self, peer: EnginePeer | DetokenizerPeer) -> None:
        for pending in self._pending.values():
            if pending.engine is peer and not pending.answered.done():
                pending.answered.set_result(None)

    def on_answer(self, answer: CallAnswer) -> None:
        pending = self._pending.get(answer.number)
        if pending is not None and not pending.answered.done():
            pending.answered.set_result(answer)
        else:
            self._log.debug("late_call_answer", engine_epoch=answer.engine_epoch)

    async def call(self, call: MethodCall, seconds: float) -> list[EngineAnswers]:
        """By engine. An engine that is lost or late answers with an error. Raises RequestError NO_ENGINE."""
        engines = sorted(self._membership.engines.alive, key=lambda engine: engine.name)
        if not engines:
            raise RequestError(ErrorCode.NO_ENGINE, "no engine is known to be alive")
        loop = asyncio.get_running_loop()
        # All of them before the first is sent: an engine may be lost before its task runs.
        pending = {secrets.randbits(63): _Pending(engine, loop.create_future()) for engine in engines}
        self._pending |= pending
        try:
            calls = (self._call(number, each, call, seconds) for number, each in pending.items())
            return await asyncio.gather(*calls)
        finally:
            for number in pending:
                del self._pending[number]

    async def _call(self, number: int, pending: _Pending, call: MethodCall, seconds: float) -> EngineAnswers:
        engine, answered = pending
        message, sent, problem = Call(engine.epoch, number, self._address, call), False, "the engine was lost"
        try:
            async with asyncio.timeout(seconds):
                while not answered.done() and not (sent := engine.lane.send(message)):
                    await asyncio.wait({answered}, timeout=FULL_LANE_RETRY_SECONDS)
                answer = await answered
        except TimeoutError:
            answer, problem = None, f"no answer within {seconds:g} s"
        if answer is not None:
            return EngineAnswers(engine.name, answer.answers)
        outcome = "it may have run the method" if sent else "the method was not sent to it"
        return EngineAnswers(engine.name, [failed(None, f"{problem}; {outcome}")])
