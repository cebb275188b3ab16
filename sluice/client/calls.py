"""Streaming calls that are cancelled when they are closed or deleted; `Steps`, the stream of engine statistics."""

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

from sluice.client.errors import from_call_error, from_rpc_error, is_task_cancelled
from sluice.v1 import admin_pb2


class OpenCall:
    """Base of the blocking streams."""

    # On the class, for `__del__` after a constructor that raised.
    _call: Any = None

    def __init__(self, call: Any) -> None:
        self._call = call
        self._closed = threading.Event()

    def close(self) -> None:
        """End the stream and cancel its call. Thread-safe."""
        self._closed.set()
        self._call.cancel()

    def _replace(self, call: Any) -> None:
        self._call = call
        # `close` in another thread may have cancelled the former call only.
        if self._closed.is_set():
            call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._call is not None:
            self._call.cancel()


class AsyncOpenCall:
    """Base of the asyncio streams."""

    _call: Any = None

    def __init__(self, call: Any) -> None:
        self._closed = asyncio.Event()
        self._replace(call)

    def close(self) -> None:
        """End the stream and cancel its call."""
        self._closed.set()
        self._call.cancel()

    def _replace(self, call: Any) -> None:
        self._call = call
        self._incoming = aiter(call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._call is not None and not self._call.done():
            self._call.cancel()


class Steps(OpenCall):
    """Iterator of `StreamStepsResponse`: every engine step from now on. Silent while engines idle; endless."""

    def __init__(self, call: Any, on_error: Callable[[], None]) -> None:
        """Returns once the server records steps, or has refused the call: then the first `next` raises."""
        super().__init__(call)
        self._on_error = on_error
        call.initial_metadata()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> admin_pb2.StreamStepsResponse:
        try:
            found: admin_pb2.StreamStepsResponse = next(self._call)
        except grpc.RpcError as error:
            if self._closed.is_set():
                raise StopIteration from None
            self._on_error()
            raise from_rpc_error(error) from None
        return found


class AsyncSteps(AsyncOpenCall):
    """Asynchronous iterator of `StreamStepsResponse`: every engine step after `started`, silent while engines idle."""

    def __init__(self, call: Any, on_error: Callable[[], None]) -> None:
        super().__init__(call)
        self._on_error = on_error

    async def started(self) -> None:
        """Wait until the server records steps, or has refused the call: then the iteration raises."""
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
            self._on_error()
            raise from_call_error(error) from None
        return found
