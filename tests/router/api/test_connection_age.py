"""Connections have a maximum age: the client reconnects, and its streams continue."""

import asyncio

import grpc
import pytest
from pydantic import ValidationError

from router.api.listener import _options
from sluice.settings.services import RouterSettings
from tests.fakes.ring_scripts import generate
from tests.router.conftest import rest, text_spec

AGE = "grpc.max_connection_age_ms"
GRACE = "grpc.max_connection_age_grace_ms"


def options(**settings) -> dict:
    return dict(_options(RouterSettings(model="m", **settings)))


def test_the_age_is_unlimited_by_default():
    assert not options().keys() & {AGE, GRACE}
    assert options(max_connection_age=600.0)[AGE] == 600_000
    assert GRACE not in options(max_connection_age=600.0)
    assert options(max_connection_age=600.0, max_connection_age_grace=0.0)[GRACE] == 0


@pytest.mark.parametrize("bad", [{"max_connection_age": -1.0}, {"max_connection_age_grace": 5.0}])
def test_invalid_values_are_refused_by_name(bad):
    with pytest.raises(ValidationError, match=next(iter(bad))):
        options(**bad)


class Connections:
    """A proxy in front of the router that counts the connections a channel opens."""

    def __init__(self, port: int) -> None:
        self.opened = 0
        self._port = port
        self._tasks: list[asyncio.Task] = []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader, writer):
        self.opened += 1
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._port)
        self._tasks += [
            asyncio.create_task(self._pass(*pair)) for pair in ((reader, upstream), (upstream_reader, writer))
        ]

    async def _pass(self, reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()


async def test_a_stream_outlives_its_connections_age_and_new_calls_use_a_new_connection(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(max_connection_age=0.5)
    may_continue = asyncio.Event()

    async def wait_then_generate(call):
        await call.send(start=True)
        await may_continue.wait()
        await generate(call)

    async with (
        Connections(client.router.port) as connections,
        grpc.aio.insecure_channel(f"127.0.0.1:{connections.port}") as channel,
    ):
        client.generation = type(client.generation)(channel)
        ring.script = wait_then_generate
        stream = client.stream(text_spec())
        assert (await stream.read()).HasField("started")
        ring.script = generate
        opened = connections.opened
        async with asyncio.timeout(60):
            while connections.opened == opened:
                await client.generate(text_spec())
                await asyncio.sleep(0.05)
        may_continue.set()
        assert (await rest(stream))[-1].done.usage.completion_tokens == 24
