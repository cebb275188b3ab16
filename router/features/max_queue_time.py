"""A limit on the wait for the first step. Some clients prefer an error after a second to an answer after a minute."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from router.errors import RequestError, Violations
from router.parse.model import Limits
from router.requests.part import Interrupt, Part
from router.requests.token_log import RequestLog
from sluice.v1 import generation_pb2 as pb
from sluice.wire.errors import ErrorCode


@dataclass(frozen=True)
class MaxQueueTime:
    fields = frozenset({"max_queue_time"})

    _limits: Limits

    async def parse(self, message: pb.GenerationSpec, bad: Violations, _: str) -> "_MaxQueueTime | None":
        seconds = bad.duration("spec.max_queue_time", message.max_queue_time, self._limits.time_limit)
        # A stream that is resumed began earlier.
        return None if any(part.token_ids for part in message.resume) else _MaxQueueTime(seconds)


@dataclass(frozen=True, slots=True)
class _MaxQueueTime(Part):
    seconds: float

    @contextmanager
    def during(self, log: RequestLog, interrupt: Interrupt) -> Iterator[None]:
        def refuse_unless_started() -> None:
            if log.started is None:
                message = f"no engine began the request within spec.max_queue_time, which is {self.seconds:g} s"
                log.fail(RequestError(ErrorCode.OVERLOADED, message))
                interrupt()

        timer = asyncio.get_running_loop().call_later(self.seconds, refuse_unless_started)
        try:
            yield
        finally:
            timer.cancel()
