"""What engines do, as it happens: endless streams of statistics."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

import grpc

from sluice.client.calls import AsyncOpenCall, OpenCall
from sluice.client.errors import from_call_error, from_rpc_error, is_task_cancelled
from sluice.v1 import admin_pb2


class Steps(OpenCall):
    """Iterator of `StreamStepsResponse`: every step from now on. Silent while engines idle; endless until closed."""

    def __init__(self, call: Any, failed: Callable[[], None]) -> None:
        """Returns once the server listens, or has refused, which the first `next` tells; `failed` is called then."""
        super().__init__(call)
        self._failed = failed
        call.initial_metadata()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> admin_pb2.StreamStepsResponse:
        try:
            found: admin_pb2.StreamStepsResponse = next(self._call)
        except grpc.RpcError as error:
            if self._closed.is_set():
                raise StopIteration from None
            self._failed()
            raise from_rpc_error(error) from None
        return found


class AsyncSteps(AsyncOpenCall):
    """Asynchronous iterator of `StreamStepsResponse`: every step from `started` on.

    Silent while engines idle; endless until closed.
    """

    def __init__(self, call: Any, failed: Callable[[], None]) -> None:
        super().__init__(call)
        self._failed = failed

    async def started(self) -> None:
        """Wait until the server listens, so that no later step is missed; or has refused, which the iteration tells."""
        await self._call.initial_metadata()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> admin_pb2.StreamStepsResponse:
        try:
            found: admin_pb2.StreamStepsResponse = await anext(self._incoming)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            if is_task_cancelled():
                raise
            if self._closed.is_set():
                raise StopAsyncIteration from None
            self._failed()
            raise from_call_error(error) from None
        return found
