"""Merges the chunks of several streams."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from sluice.client import AsyncStream, Chunk

MAX_WAITING = 16
"""Chunks buffered for a slow client. When the buffer is full, the streams are not read."""


class Item(NamedTuple):
    number: int
    """Index of the stream."""
    stream: AsyncStream
    chunk: Chunk


async def merged(streams: Sequence[AsyncStream]) -> AsyncGenerator[Item, None]:
    """Chunks of all streams, in order of arrival. Closes the streams at the end."""
    if len(streams) == 1:
        async with streams[0] as stream:
            async for chunk in stream:
                yield Item(0, stream, chunk)
        return
    async with aclosing(_interleaved(streams)) as items:
        async for item in items:
            yield item


async def _interleaved(streams: Sequence[AsyncStream]) -> AsyncGenerator[Item, None]:
    queue: asyncio.Queue[Item | BaseException | None] = asyncio.Queue(MAX_WAITING)
    pumps = [asyncio.create_task(_pump(number, stream, queue)) for number, stream in enumerate(streams)]
    open_streams = len(pumps)
    try:
        while open_streams:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(number: int, stream: AsyncStream, queue: "asyncio.Queue[Item | BaseException | None]") -> None:
    try:
        async with stream:
            async for chunk in stream:
                await queue.put(Item(number, stream, chunk))
        await queue.put(None)
    except Exception as error:  # noqa: BLE001 - raised by the reader of the queue
        await queue.put(error)
