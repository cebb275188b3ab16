"""An answer as server-sent events."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.types import Send

from gateway.answers.objects import Answer, End
from gateway.errors import ApiError

SILENCE_SECONDS = 15.0
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
COMMENT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"


BEFORE, AFTER = b"data: ", b"\n\n"
NO_CHOICES = b'"choices":[]'
"""Nowhere else in an encoded answer: in a text, quotes are escaped."""


def event(data: bytes) -> bytes:
    return BEFORE + data + AFTER


class ChunkEvents:
    """The chunks of an answer as events. What they have in common is encoded once."""

    def __init__(self, empty: Answer) -> None:
        """`empty`: without choices."""
        head, choices, tail = msgspec.json.encode(empty).partition(NO_CHOICES)
        self._head, self._tail = BEFORE + head + choices[:-1], b"]" + tail + AFTER
        self._encode = msgspec.json.Encoder().encode

    def of(self, choice: End) -> bytes:
        return self._head + self._encode(choice) + self._tail


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
