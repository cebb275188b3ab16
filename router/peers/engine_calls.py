"""Calls a method on the ranks of all engines. The call is sent once over the ring and answered on the side lane."""

import asyncio
import secrets
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from router.errors import RequestError
from router.peers.membership import Membership
from router.peers.peers import DetokenizerPeer, EnginePeer
from sluice.wire.calls import CallAnswer, EngineCall, MethodCall, RankAnswer, failed
from sluice.wire.errors import ErrorCode

FULL_LANE_RETRY_SECONDS = 0.05
"""A lane does not signal when it has room again, so sending is retried."""


class EngineAnswers(NamedTuple):
    engine: str
    answers: list[RankAnswer]
    """One answer per rank, or a single error for the whole engine."""


class _PendingCall(NamedTuple):
    engine: EnginePeer
    answered: "asyncio.Future[CallAnswer | None]"
    """The engine's answer; None if the engine was lost."""


class EngineCalls:
    def __init__(self, membership: Membership, address: str, log: BoundLogger) -> None:
        """`address`: address of this router's inbox."""
        self._membership = membership
        self._address = address
        self._log = log
        self._pending: dict[int, _PendingCall] = {}
        """By number of the call."""

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
        """Answers of all engines, sorted by name. A lost or late engine yields an error as its answer.

        Raises RequestError NO_ENGINE.
        """
        engines = sorted(self._membership.engines.alive, key=lambda engine: engine.name)
        if not engines:
            raise RequestError(ErrorCode.NO_ENGINE, "no engine is known to be alive")
        loop = asyncio.get_running_loop()
        # Register all calls before the first one is sent: an engine may be lost before its task runs.
        pending = {secrets.randbits(63): _PendingCall(engine, loop.create_future()) for engine in engines}
        self._pending |= pending
        try:
            calls = (self._call(number, engine_call, call, seconds) for number, engine_call in pending.items())
            return await asyncio.gather(*calls)
        finally:
            for number in pending:
                del self._pending[number]

    async def _call(self, number: int, pending: _PendingCall, call: MethodCall, seconds: float) -> EngineAnswers:
        engine, answered = pending
        message, sent, problem = EngineCall(engine.epoch, number, self._address, call), False, "the engine was lost"
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
