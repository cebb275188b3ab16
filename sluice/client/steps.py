"""What engines do, as it happens: endless streams of statistics."""

import asyncio
from typing import Any, Self

import grpc

from sluice.client.calls import AsyncOpenCall, OpenCall
from sluice.client.errors import is_task_cancelled
from sluice.v1 import admin_pb2


class Steps(OpenCall):
    """Iterator of `StreamStepsResponse`: every step from now on. Silent while engines idle; endless until closed."""

    def __init__(self, call: Any) -> None:
        """Returns once the server listens, or has refused, which the first `next` tells."""
        super().__init__(call)
        call.initial_metadata()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> admin_pb2.StreamStepsResponse:
        try:
            found: admin_pb2.StreamStepsResponse = next(self._call)
        except grpc.RpcError as error:
            raise self._ended(error) from None
        return found


class AsyncSteps(AsyncOpenCall):
    """Asynchronous iterator of `StreamStepsResponse`: every step from `started` on.

    Silent while engines idle; endless until closed.
    """

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
            raise self._ended(error) from None
        return found
