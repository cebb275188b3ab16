"""An answer as server-sent events."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import Send

from gateway.errors import ApiError

SILENCE_SECONDS = 15.0
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
COMMENT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class EventStream:
    """Sends events as they come, and a comment after each `silence` seconds without one.

    The status is sent with the first event, or after so much silence: until then an error can still be a status.
    """

    def __init__(self, send: Send, silence: float = SILENCE_SECONDS) -> None:
        self._send = send
        self._silence = silence
        self._begun = False
        self._sent_at = time.monotonic()

    async def run(self, events: AsyncGenerator[bytes, None]) -> None:
        """Raises ApiError if nothing has been sent."""
        waiting = asyncio.create_task(self._break_silence())
        try:
            async with aclosing(events):
                async for data in events:
                    await self._write(data)
            await self._write(DONE)
        except ApiError as error:
            if not self._begun:
                raise
            await self._write(event(error.body))
        finally:
            waiting.cancel()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent_at = time.monotonic()

    async def _break_silence(self) -> None:
        while True:
            left = self._sent_at + self._silence - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self._write(COMMENT)
