"""Work that is cancelled when its client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`. If the client closes its connection first, cancel `work` and raise ClientDisconnect."""
    running, disconnected = asyncio.create_task(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((running, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnect
        return running.result()
    finally:
        running.cancel()
        disconnected.cancel()
        await asyncio.gather(running, disconnected, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
