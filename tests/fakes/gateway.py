"""An HTTP gateway that runs in this process, and a client of it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import structlog

from gateway.api.gateway import Gateway
from gateway.service import Server
from sluice import AsyncClient
from sluice.settings.gateway import GatewaySettings


@dataclass
class Running:
    gateway: Gateway
    url: str
    http: httpx.AsyncClient
    server: Server

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def post(self, path: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return await self.http.post(path, json=fields, headers=headers)

    async def events(self, path: str, **fields: Any) -> list[Any]:
        """The decoded data of all server-sent events; "[DONE]" as it is."""
        text = (await self.post(path, stream=True, **fields)).text
        parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]
        return [part if part == "[DONE]" else json.loads(part) for part in parts]


@asynccontextmanager
async def running(addresses: str | Sequence[str], **settings: Any) -> AsyncIterator[Running]:
    routers = (addresses,) if isinstance(addresses, str) else tuple(addresses)
    parsed = GatewaySettings(routers=routers, port=0, drain_timeout=1, **settings)
    async with AsyncClient(routers, resume_timeout=parsed.resume_timeout) as client:
        gateway = Gateway(client, parsed, structlog.get_logger())
        # With the protocol, without which asyncio does not set TCP_NODELAY.
        listener = socket.socket(proto=socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = Server(gateway)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                yield Running(gateway, url, http, server)
        finally:
            # uvicorn's own shutdown takes 0.2 s.
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            for listening in server.servers:
                listening.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()
