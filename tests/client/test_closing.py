"""Streams and clients that are closed early, from the same or another thread or task."""

import asyncio
import threading
from contextlib import suppress

import pytest

from sluice import AsyncClient, Client
from sluice.client import Cancelled


def leave_by_close(client: Client) -> None:
    stream = client.stream("x")
    next(stream)
    stream.close()
    assert list(stream) == []


def leave_by_cancel(client: Client) -> None:
    stream = client.stream("x")
    next(stream)
    stream.cancel()
    assert list(stream) == []


def leave_by_with(client: Client) -> None:
    with client.stream("x") as stream:
        next(stream)


def leave_by_break(client: Client) -> None:
    for _ in client.stream("x"):
        break


def leave_by_exception(client: Client) -> None:
    with suppress(ZeroDivisionError), client.stream("x") as stream:
        _ = [1 / 0 for _ in stream]


@pytest.mark.parametrize("leave", [leave_by_close, leave_by_cancel, leave_by_with, leave_by_break, leave_by_exception])
def test_ending_a_stream_early_cancels_its_request(script, address, leave) -> None:
    script.hangs = True
    with Client(address) as client:
        leave(client)
        assert script.gone.wait(60)


async def leave_async_by_close(client: AsyncClient) -> None:
    stream = client.stream("x")
    await anext(stream)
    stream.close()
    assert [chunk async for chunk in stream] == []


async def leave_async_by_cancel(client: AsyncClient) -> None:
    stream = client.stream("x")
    await anext(stream)
    stream.cancel()
    assert [chunk async for chunk in stream] == []


async def leave_async_by_with(client: AsyncClient) -> None:
    async with client.stream("x") as stream:
        await anext(stream)


async def leave_async_by_break(client: AsyncClient) -> None:
    async for _ in client.stream("x"):
        break


async def leave_async_by_task(client: AsyncClient) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in client.stream("x"):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "leave",
    [leave_async_by_close, leave_async_by_cancel, leave_async_by_with, leave_async_by_break, leave_async_by_task],
)
async def test_ending_an_async_stream_early_cancels_its_request(script, address, leave) -> None:
    script.hangs = True
    async with AsyncClient(address) as client:
        await leave(client)
        assert await asyncio.to_thread(script.gone.wait, 60)


def test_close_from_another_thread_ends_the_stream(script, address) -> None:
    script.hangs = True
    with Client(address) as client:
        stream, texts = client.stream("x"), []
        for chunk in stream:
            texts.append(chunk.text)
            if len(texts) == len(script.texts):
                # Later, while the client waits for a chunk that the server does not send.
                threading.Timer(0.1, stream.close).start()
        assert texts == script.texts


async def test_close_from_another_task_ends_the_stream(script, address) -> None:
    script.hangs = True
    async with AsyncClient(address) as client:
        stream, texts = client.stream("x"), []
        async for chunk in stream:
            texts.append(chunk.text)
            if len(texts) == len(script.texts):
                asyncio.get_running_loop().call_later(0.1, stream.close)
        assert texts == script.texts


async def test_closing_the_client_during_a_call(script, address) -> None:
    script.hangs = True
    client = AsyncClient(address)
    stream, unary = client.stream("x"), asyncio.create_task(client.generate("x"))
    await anext(stream)
    await client.close()
    with pytest.raises(Cancelled):
        _ = [chunk async for chunk in stream]
    with pytest.raises(Cancelled):
        await unary
    blocking = Client(address)
    live = blocking.stream("x")
    next(live)
    threading.Timer(0.1, blocking.close).start()
    with pytest.raises(Cancelled):
        list(live)


async def test_a_closed_client(address) -> None:
    client = Client(address)
    client.close()
    for call in (client.stream, client.generate, client.tokenize):
        with pytest.raises(Cancelled, match="closed"):
            call("x")
    async_client = AsyncClient(address)
    await async_client.close()
    with pytest.raises(Cancelled, match="closed"):
        async_client.stream("x")
    with pytest.raises(Cancelled, match="closed"):
        await async_client.generate("x")
