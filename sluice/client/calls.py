"""A call that streams, as long as its reader wants it: closing, leaving its `with` block or dropping it cancels it."""

from types import TracebackType
from typing import Any, Self

import grpc

from sluice.client.errors import from_call_error, from_rpc_error


class OpenCall:
    """Base of blocking streams."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._closed = False

    def close(self) -> None:
        """End it here, from any thread; what still runs for it is cancelled."""
        self._closed = True
        self._call.cancel()

    def _ended(self, error: grpc.RpcError) -> Exception:
        """What to raise for an error of the call: after `close` it is just the end."""
        return StopIteration() if self._closed else from_rpc_error(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._call.cancel()


class AsyncOpenCall:
    """The same for asyncio."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._incoming = aiter(call)
        self._closed = False

    def close(self) -> None:
        """End it here; what still runs for it is cancelled."""
        self._closed = True
        self._call.cancel()

    def _ended(self, error: BaseException) -> Exception:
        """What to raise for an error of the call: after `close` it is just the end."""
        return StopAsyncIteration() if self._closed else from_call_error(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._call.done():
            self._call.cancel()
