"""A call that streams, as long as its reader wants it: closing, leaving its `with` block or dropping it cancels it."""

import asyncio
import threading
from types import TracebackType
from typing import Any, Self


class OpenCall:
    """Base of blocking streams."""

    _call: Any = None

    def __init__(self, call: Any) -> None:
        self._call = call
        self._closed = threading.Event()

    def close(self) -> None:
        """End it here, from any thread; what still runs for it is cancelled."""
        self._closed.set()
        self._call.cancel()

    def _replace(self, call: Any) -> None:
        """Go on with another one."""
        self._call = call
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
    """The same for asyncio."""

    _call: Any = None

    def __init__(self, call: Any) -> None:
        self._closed = asyncio.Event()
        self._replace(call)

    def close(self) -> None:
        """End it here; what still runs for it is cancelled."""
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
