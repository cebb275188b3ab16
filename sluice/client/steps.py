"""What engines do, as it happens: endless streams of statistics."""

import asyncio
from types import TracebackType
from typing import Any, Self

import grpc

from sluice.client.errors import from_call_error, from_rpc_error, is_task_cancelled
from sluice.v1 import admin_pb2


class Steps:
    """Iterator of `StreamStepsResponse`: every step from now on. Silent while engines idle; endless until closed."""

    def __init__(self, call: Any) -> None:
        """Returns once the server listens, or has refused, which the first `next` tells."""
        self._call = call
        self._closed = False
        call.initial_metadata()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> admin_pb2.StreamStepsResponse:
        try:
            found: admin_pb2.StreamStepsResponse = next(self._call)
        except grpc.RpcError as error:
            if self._closed:
                raise StopIteration from None
            raise from_rpc_error(error) from None
        return found

    def close(self) -> None:
        """End it, from any thread."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._call.cancel()


class AsyncSteps:
    """Asynchronous iterator of `StreamStepsResponse`: every step from `started` on.

    Silent while engines idle; endless until closed.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._incoming = aiter(call)
        self._closed = False

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
            if self._closed:
                raise StopAsyncIteration from None
            raise from_call_error(error) from None
        return found

    def close(self) -> None:
        """End it."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._call.done():
            self._call.cancel()
