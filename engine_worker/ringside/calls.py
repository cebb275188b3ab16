"""Calls of methods on this engine's ranks, requested by routers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from engine_worker.protocol import PendingCall, Runner
from sluice.wire.calls import CallAnswer, EngineCall, RankAnswer, failed

MAX_PENDING = 16


class _RunningCall(NamedTuple):
    call: EngineCall
    answers: PendingCall


@dataclass(eq=False)
class Calls:
    """To be used in the engine's thread, between two steps."""

    _runner: Runner
    _epoch: int
    _send: Callable[[str, CallAnswer], None]
    """(address of a router, message)."""
    _log: BoundLogger
    _pending: list[_RunningCall] = field(default_factory=list)

    @property
    def pending(self) -> bool:
        """Whether ranks still have to answer."""
        return bool(self._pending)

    def begin(self, message: EngineCall) -> None:
        # Another epoch: the call is for an earlier process at this address, which its router knows to be lost.
        if message.engine_epoch != self._epoch:
            self._log.warning("call_dropped", reason="other_epoch", method=message.call.method)
        elif len(self._pending) >= MAX_PENDING:
            self._answer(message, [failed(None, f"the engine is already running {MAX_PENDING} calls: try again later")])
        else:
            self._pending.append(_RunningCall(message, self._runner.call(message.call)))

    def finish(self) -> None:
        """Send the answers of calls to which every rank has replied."""
        if not self._pending:
            return
        unfinished: list[_RunningCall] = []
        for pending in self._pending:
            answers = pending.answers.poll()
            if answers is None:
                unfinished.append(pending)
            else:
                self._answer(pending.call, answers)
        self._pending = unfinished

    def _answer(self, message: EngineCall, answers: list[RankAnswer]) -> None:
        errors = [answer.error for answer in answers if answer.error]
        self._log.info("method_called", method=message.call.method, ranks=len(answers), failed=len(errors))
        self._send(message.router, CallAnswer(self._epoch, message.number, answers))
