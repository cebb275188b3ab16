"""The endless streams of AdminService: statistics of steps, and KV cache events. They end when their router does."""

import asyncio
from typing import Any, Generic, Self, TypeVar

import grpc

from sluice.client.connection import Router, Routers
from sluice.client.errors import is_task_cancelled, with_timeout
from sluice.client.streams import AsyncOpenCall, OpenCall
from sluice.v1 import admin_pb2 as pb

R = TypeVar("R")


class Feed(OpenCall, Generic[R]):
    """Iterator over the responses of one router.

    Raises SluiceError when the stream ends; a new feed then uses the next router.
    """

    def __init__(self, routers: Routers, method: str, request: Any, timeout: float | None) -> None:
        """Wait until the server has started the stream, or refused it, in which case the first `next` raises."""
        self._routers, self._router, self._timeout = routers, routers.current, timeout
        super().__init__(_start(routers, self._router, method, request, timeout))
        self._call.initial_metadata()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        try:
            response: R = next(self._call)
        except grpc.RpcError as error:
            if self._closed.is_set():
                raise StopIteration from None
            self._routers.skip(self._router)
            raise with_timeout(self._router.error(error), self._timeout) from None
        return response


class AsyncFeed(AsyncOpenCall, Generic[R]):
    """Asynchronous iterator over the responses of one router.

    Raises SluiceError when the stream ends; a new feed then uses the next router.
    """

    def __init__(self, routers: Routers, method: str, request: Any, timeout: float | None) -> None:
        self._routers, self._router, self._timeout = routers, routers.current, timeout
        super().__init__(_start(routers, self._router, method, request, timeout))

    async def started(self) -> None:
        """Wait until the server has started the stream, or refused it, in which case the iteration raises."""
        await self._call.initial_metadata()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> R:
        try:
            response: R = await anext(self._incoming)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            if is_task_cancelled():
                raise
            if self._closed.is_set():
                raise StopAsyncIteration from None
            self._routers.skip(self._router)
            raise with_timeout(self._router.error(error), self._timeout) from None
        return response


class Steps(Feed[pb.StreamStepsResponse]):
    """Endless iterator over `StreamStepsResponse`: every engine step from now on. Waits while all engines are idle."""

    def __init__(self, routers: Routers, timeout: float | None) -> None:
        super().__init__(routers, "StreamSteps", pb.StreamStepsRequest(), timeout)


class AsyncSteps(AsyncFeed[pb.StreamStepsResponse]):
    """Endless asynchronous iterator over `StreamStepsResponse`: every engine step from `started` on."""

    def __init__(self, routers: Routers, timeout: float | None) -> None:
        super().__init__(routers, "StreamSteps", pb.StreamStepsRequest(), timeout)


class CacheEvents(Feed[pb.StreamCacheEventsResponse]):
    """Endless iterator over `StreamCacheEventsResponse`: the KV cache events in the engines' buffers, then new ones."""

    def __init__(self, routers: Routers, engine_id: str, timeout: float | None) -> None:
        super().__init__(routers, "StreamCacheEvents", pb.StreamCacheEventsRequest(engine_id=engine_id), timeout)


class AsyncCacheEvents(AsyncFeed[pb.StreamCacheEventsResponse]):
    """Endless asynchronous iterator over `StreamCacheEventsResponse`, like `CacheEvents`."""

    def __init__(self, routers: Routers, engine_id: str, timeout: float | None) -> None:
        super().__init__(routers, "StreamCacheEvents", pb.StreamCacheEventsRequest(engine_id=engine_id), timeout)


def _start(routers: Routers, router: Router, method: str, request: Any, timeout: float | None) -> Any:
    return routers.start(router, lambda each: getattr(each.admin, method), request, timeout)
