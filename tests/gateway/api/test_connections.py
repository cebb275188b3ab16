"""Clients that disconnect, are slow, send nothing, or send too much."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

import pytest

from gateway import connection
from gateway.answers import event_stream
from tests.fakes.gateway import running
from tests.fakes.processes import LIMIT
from tests.fakes.server import FakeServer


def head(body: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(0.01)


async def test_closing_a_stream_cancels_the_request(gateway, script):
    script.hangs = True
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(head(json.dumps({"prompt": "x", "stream": True}).encode()))
    await reader.readuntil(b"world")
    assert not script.gone.is_set()
    writer.close()
    await until(script.gone.is_set)
    await until(lambda: bool(gateway.gateway.counters.requests))
    assert gateway.gateway.counters.requests == {("/v1/completions", "499"): 1}
    assert gateway.gateway.counters.open == 0


async def test_closing_before_the_first_token_cancels_the_request(gateway, script):
    script.texts, script.hangs = [], True
    for fields in ({"stream": True}, {"stream": True, "prompt": ["x", "y"]}):
        script.gone.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        requests_before = len(script.seen)
        writer.write(head(json.dumps({"prompt": "x", **fields}).encode()))
        await until(lambda: len(script.seen) > requests_before)  # noqa: B023
        writer.close()
        await until(script.gone.is_set)


async def test_closing_while_the_whole_answer_is_computed(gateway, script, monkeypatch):
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    hang = FakeServer._hang

    def hang_and_note(self, context, request_id=""):
        hang(self, context, request_id)
        loop.call_soon_threadsafe(ended.set)

    monkeypatch.setattr(FakeServer, "_hang", hang_and_note)
    script.hangs = True
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(head(b'{"prompt": "x"}'))
    await until(lambda: bool(script.hanging))
    writer.close()
    await asyncio.wait_for(ended.wait(), LIMIT)


async def test_a_comment_is_sent_after_silence(address, script, monkeypatch):
    monkeypatch.setattr(event_stream.EventStream.__init__, "__defaults__", (0.1,))
    script.hangs = True
    async with running(address) as gateway:
        for texts in (["a"], []):
            script.texts = texts
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(head(b'{"prompt": "x", "stream": true}'))
            for _ in range(2):
                await asyncio.wait_for(reader.readuntil(b": waiting\n\n"), LIMIT)
            writer.close()


async def test_an_endless_request_head(gateway):
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n")
    for _ in range(20):
        writer.write(b"x-a: " + b"b" * 8000 + b"\r\n")
    # The response may be lost: the connection is reset if the client sends more after it.
    with suppress(ConnectionError):
        assert (await asyncio.wait_for(reader.readline(), LIMIT)).startswith(b"HTTP/1.1 400")
        await asyncio.wait_for(reader.read(), LIMIT)
    assert (await gateway.http.get("/version")).status_code == 200


@pytest.mark.parametrize("begin", [b"", b"GET /ver"])
async def test_a_client_that_sends_nothing(address, monkeypatch, begin):
    async with running(address) as gateway:
        with monkeypatch.context() as patch:
            patch.setattr(connection, "HEAD_SECONDS", 0.2)
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(begin)
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), LIMIT) == b""
        # The next connection has the usual timeout, even if this thread is delayed.
        assert (await gateway.http.get("/version")).status_code == 200


async def test_connections_beyond_the_limit_close_those_that_wait_longest(address):
    async with running(address, max_connections=3) as gateway:
        idle = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(3)]
        idle[0][1].write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        await asyncio.sleep(0.05)
        assert (await gateway.http.get("/version")).status_code == 200
        with suppress(ConnectionError):
            assert await asyncio.wait_for(idle[0][0].read(), LIMIT) == b""
        for _, writer in idle:
            writer.close()


async def test_connections_beyond_the_limit_while_all_have_requests(address, script):
    script.hangs = True
    async with running(address, max_connections=2) as gateway:
        writers = []
        for number in range(1, 3):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(head(b'{"prompt": "x"}'))
            writers.append(writer)
            await until(lambda: gateway.gateway.counters.open == number)  # noqa: B023
        answer = await gateway.http.get("/version")
        assert (answer.status_code, answer.headers["connection"]) == (503, "close")
        assert "2 connections, its limit" in answer.json()["error"]["message"]
        for writer in writers:
            writer.close()


@pytest.mark.quick(1)
@pytest.mark.parametrize("path", ["/version", "/v1/models"])
async def test_pipelined_requests_are_all_answered(gateway, path):
    """More of them than are read at once, and parsed no faster than they are answered."""
    count = 20_000 if path == "/version" else 300
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode() * count)
    answers = 0
    while answers < count:
        part = await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 200"), LIMIT)
        answers += part.count(b"HTTP/1.1 200")
    assert gateway.gateway.budget.used == 0
    writer.close()


async def test_a_refused_body_is_not_read_forever(gateway, monkeypatch):
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\n\r\n")
    assert (await asyncio.wait_for(reader.readline(), LIMIT)).startswith(b"HTTP/1.1 413")
    with suppress(ConnectionError):
        async with asyncio.timeout(LIMIT):
            while True:
                writer.write(b"x" * 1000)
                await writer.drain()
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "data", [b"\0\0\0\0\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00"]
)
async def test_bytes_that_are_not_http(gateway, data):
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(data)
    writer.write_eof()
    await asyncio.wait_for(reader.read(), LIMIT)
    assert (await gateway.http.get("/version")).status_code == 200
    writer.close()


async def test_a_client_that_does_not_read_is_disconnected(address, script, monkeypatch):
    """Until then the amount of buffered data is bounded: the router's stream is not read."""
    script.texts = ["x" * 50_000] * 400
    async with running(address, slow_client_timeout=1.0) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        writer.write(head(b'{"prompt": "x", "stream": true}'))
        await reader.readline()
        writer.transport.pause_reading()
        await asyncio.sleep(0.5)
        assert gateway.gateway.counters.events < 300
        await until(lambda: bool(gateway.gateway.counters.requests))
        assert gateway.gateway.counters.requests["/v1/completions", "499"] == 1
        writer.transport.abort()


async def test_connections_accepted_while_the_server_ends(gateway, monkeypatch):
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.05)
    checked, shutdown = asyncio.Event(), gateway.server.shutdown

    async def late_shutdown(sockets=None):
        await checked.wait()
        await shutdown(sockets)

    monkeypatch.setattr(gateway.server, "shutdown", late_shutdown)
    gateway.server.stop()
    idle, idle_writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    busy, busy_writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    busy_writer.write(head(b'{"prompt": "x"}'))
    answer = await asyncio.wait_for(busy.read(), LIMIT)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer
    assert await asyncio.wait_for(idle.read(), LIMIT) == b""
    checked.set()
    for writer in (idle_writer, busy_writer):
        writer.close()
