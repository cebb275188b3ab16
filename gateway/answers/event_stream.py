"""Responses as server-sent events."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.types import Send

from gateway.answers.objects import Answer, End
from gateway.errors import ApiError

SILENCE_SECONDS = 15.0
"""Time without an event after which a comment is sent, so that proxies keep the connection open."""
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
COMMENT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"

PREFIX, SUFFIX = b"data: ", b"\n\n"
NO_CHOICES = b'"choices":[]'
"""Occurs only once in an encoded answer, because quotes within strings are escaped."""


def event(data: bytes) -> bytes:
    return PREFIX + data + SUFFIX


class ChunkEvents:
    """Encodes the chunks of an answer as events. The fields that all chunks share are encoded once."""

    def __init__(self, empty: Answer) -> None:
        """`empty`: the answer without choices."""
        head, choices, tail = msgspec.json.encode(empty).partition(NO_CHOICES)
        self._head, self._tail = PREFIX + head + choices[:-1], b"]" + tail + SUFFIX
        self._encode = msgspec.json.Encoder().encode

    def of(self, choice: End) -> bytes:
        return self._head + self._encode(choice) + self._tail


class EventStream:
    """Sends events as they arrive, and a comment whenever none was sent for `silence` seconds.

    The HTTP status is sent with the first event or comment. Errors before that can still be reported as a status.
    """

    def __init__(self, send: Send, silence: float = SILENCE_SECONDS) -> None:
        self._send = send
        self._silence = silence
        self._begun = False
        self._sent_at = time.monotonic()

    async def run(self, events: AsyncGenerator[bytes, None]) -> None:
        """Send `events` until they end. Raises ApiError; if something has been sent already, it is sent as an event."""
        comments = asyncio.create_task(self._break_silence())
        try:
            async with aclosing(events):
                async for data in events:
                    await self._write(data)
            await self._write(DONE)
        except ApiError as error:
            if self._begun:
                await self._write(event(error.body))
                await self._end()
            raise
        finally:
            comments.cancel()
        await self._end()

    async def _write(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent_at = time.monotonic()

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _break_silence(self) -> None:
        while True:
            seconds = self._sent_at + self._silence - time.monotonic()
            if seconds > 0:
                await asyncio.sleep(seconds)
            else:
                await self._write(COMMENT)
