"""Who makes a call, and the call itself as the services see it."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from google.protobuf.message import Message
from grpc import StatusCode, aio

Call: TypeAlias = aio.ServicerContext[Any, Any]

LEAVING_SECONDS = 1.0
"""Until gRPC has heard that a client has gone, once what is sent to it fails."""

TENANT = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, as far as anybody asked. Raises ValueError for a tenant that is no name."""

    tenant: str = ""
    """Up to 64 of `[A-Za-z0-9._:-]`; empty: nobody in particular."""
    admin: bool = False
    """May call AdminService."""

    def __post_init__(self) -> None:
        if not isinstance(self.tenant, str) or (self.tenant and not TENANT.fullmatch(self.tenant)):
            raise ValueError("a tenant is named by up to 64 of [A-Za-z0-9._:-]")


Admit: TypeAlias = Callable[[Call], Awaitable[Caller]]
"""Says who makes a call, or raises RequestError."""


class Context:
    """What an answer needs of its call."""

    __slots__ = ("_call", "caller")

    def __init__(self, call: Call, caller: Caller) -> None:
        self.caller = caller
        self._call = call

    @property
    def peer(self) -> str:
        """Where the call comes from, as gRPC writes it, such as "ipv4:10.0.0.7:53124"."""
        return self._call.peer()

    async def write(self, message: Message) -> None:
        """The next message of a stream."""
        await sent(self._call.write(message.SerializeToString()))

    async def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        """Before the first message."""
        await sent(self._call.send_initial_metadata(metadata))

    async def abort(self, code: StatusCode, details: str) -> None:
        """End the call; always raises."""
        await sent(self._call.abort(code, details))


async def sent(operation: Awaitable[None]) -> None:
    """Await an operation on a call.

    Where the client has gone it may fail a moment before gRPC hears of it and cancels the call. That moment is waited
    for: only what is a failure after it is raised.
    """
    try:
        await operation
    except aio.InternalError:
        await asyncio.sleep(LEAVING_SECONDS)
        raise
