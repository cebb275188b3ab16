"""The one coroutine that writes a stream: it takes whatever has come since its last write, joined."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from router.api.responses import ResponseBuilder
from router.errors import RequestError
from router.requests.registry import RequestState
from router.requests.token_log import SequenceLog
from sluice.ring.errors import ErrorCode
from sluice.v1 import generation_pb2 as pb

Write = Callable[[pb.GenerateStreamResponse], Awaitable[None]]


class StreamWriter:
    """Events of one request: Started, Delta…, Finished per output, Done, numbered from 1."""

    def __init__(self, live: RequestState, writer: ResponseBuilder, write: Write, write_seconds: float) -> None:
        """A single write may take `write_seconds`, then the client is given up."""
        self._live = live
        self._log = live.log
        self._writer = writer
        self._write = write
        self._write_seconds = write_seconds
        self._sequence = 0

    async def run(self, prompt_text: str) -> None:
        """Write everything; `prompt_text` comes before the text of each output. Raises the request's RequestError.

        SLOW_CLIENT where a write takes too long.
        An error that comes before the start leaves nothing written, no metadata either.
        """
        await wait_for_start(self._live)
        await self._send(started=self._writer.started())
        if prompt_text:
            for log in filter(lambda log: self._live.spec.echoes(log.index), self._log.sequences):
                await self._send(delta=pb.Delta(index=log.index, text=prompt_text))
        while True:
            while self._log.news:
                await self._send_news(self._log.news.popleft())
            if self._log.complete:
                break
            if self._log.fault is not None:
                raise self._log.fault
            await self._log.changed()
        await self._send(done=self._writer.done())

    async def _send_news(self, log: SequenceLog) -> None:
        log.listed = False
        end = log.end
        delta = self._writer.delta(log)
        if delta is not None:
            if self._live.first_delta is None:
                self._live.first_delta = time.monotonic()
            await self._send(delta=delta)
        if end is not None:
            if end.held:
                await self._send(delta=self._writer.held(log, end))
            await self._send(finished=self._writer.finished(log, end))

    async def _send(
        self,
        started: pb.Started | None = None,
        delta: pb.Delta | None = None,
        finished: pb.Finished | None = None,
        done: pb.Done | None = None,
    ) -> None:
        self._sequence += 1
        event = pb.GenerateStreamResponse(
            sequence=self._sequence, started=started, delta=delta, finished=finished, done=done
        )
        try:
            async with asyncio.timeout(self._write_seconds):
                await self._write(event)
        except TimeoutError:
            raise RequestError(
                ErrorCode.SLOW_CLIENT, f"the client took nothing for {self._write_seconds:g} s"
            ) from None


async def wait_for_start(live: RequestState) -> None:
    """Until the engine has begun, or everything has ended without it. Raises the request's RequestError."""
    while live.log.fault is None and live.log.started is None and not live.log.complete:
        await live.log.changed()
    if live.log.fault is not None:
        raise live.log.fault


async def wait_for_end(live: RequestState) -> None:
    """Until every sequence has ended. Raises the request's RequestError."""
    while live.log.fault is None and not live.log.complete:
        await live.log.changed()
    if live.log.fault is not None:
        raise live.log.fault
