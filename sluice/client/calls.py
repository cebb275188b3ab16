"""Unary calls: to the current router, with retries, or to every router."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import grpc

from sluice.client import requests
from sluice.client.adapters import UPLOAD_TRIES, AdapterCatalog, is_cut_short
from sluice.client.connection import Metadata, Method, Router, Routers, any_true
from sluice.client.errors import SluiceError, is_task_cancelled, with_timeout

T = TypeVar("T")


class Calls:
    """The calls of a blocking client. Methods raise SluiceError."""

    def __init__(self, routers: Routers) -> None:
        self._routers = routers

    def call(self, method: Method, request: Any, timeout: float | None = None, metadata: Metadata = ()) -> Any:
        """Call a router, and retry at the same or another router as long as the client's options allow."""
        retries = self._routers.begin(timeout)
        while True:
            router = self._routers.current
            seconds_left = retries.time_left(time.monotonic())
            try:
                answer = method(router)(request, timeout=seconds_left, metadata=self._routers.metadata_with(metadata))
                retries.on_admitted()
                return answer
            except grpc.RpcError as failure:
                error = router.error(failure)
            time.sleep(self._routers.on_failure(router, error, retries))
            self._routers.check_open()
            requests.set_engine_deaths(request, retries.engine_deaths)

    def call_once(self, method: Method, request: Any, timeout: float | None) -> Any:
        """Call a router, without a retry."""
        router = self._routers.current
        limit = self._routers.begin(timeout).timeout
        try:
            return method(router)(request, timeout=limit, metadata=self._routers.metadata)
        except grpc.RpcError as failure:
            error = with_timeout(router.error(failure), limit)
            self._routers.on_only_failure(router, error)
            raise error from None

    def any(self, method: Method, request: Any, is_true: Callable[[Any], bool], timeout: float | None = None) -> bool:
        """Call all routers, and return whether `is_true` holds for the answer of any."""
        return any_true(is_true, self.call_each(method, request, timeout))

    def unload_adapter(
        self, catalog: AdapterCatalog[T], adapter_id: str, timeout: float | None, metadata: Metadata = ()
    ) -> list[T]:
        """Unload an adapter at every router."""
        request = catalog.unload_request(**{f"{catalog.name}_id": adapter_id})
        answers = self.call_each(catalog.unload_method, request, timeout, metadata)
        return catalog.unloaded(self._routers.addresses, answers)

    def list_adapters(self, catalog: AdapterCatalog[T], timeout: float | None, metadata: Metadata = ()) -> list[T]:
        """List the adapters of every router, from all pages."""
        lists = catalog.lists(self._routers.all)
        while calls := lists.next_calls():
            lists.add(self.call_all(catalog.list_method, calls, timeout, metadata))
        return catalog.listed(self._routers.addresses, lists)

    def call_each(self, method: Method, request: Any, timeout: float | None, metadata: Metadata = ()) -> list[Any]:
        """Call every router with the same request, and return the answer or the error of each."""
        return self.call_all(method, [(router, request) for router in self._routers.all], timeout, metadata)

    def call_all(
        self, method: Method, calls: Iterable[tuple[Router, Any]], timeout: float | None, metadata: Metadata = ()
    ) -> list[Any]:
        """Make the calls concurrently, and return the answer or the error of each."""
        limit = self._routers.begin(timeout).timeout
        sent = self._routers.metadata_with(metadata)
        running = [(router, method(router).future(request, timeout=limit, metadata=sent)) for router, request in calls]
        return [_answer(router, call, limit) for router, call in running]


class AsyncCalls:
    """The calls of an asyncio client, on the event loop that creates it. The methods are those of `Calls`."""

    def __init__(self, routers: Routers) -> None:
        self._routers = routers

    async def call(self, method: Method, request: Any, timeout: float | None = None, metadata: Metadata = ()) -> Any:
        retries = self._routers.begin(timeout)
        while True:
            router = self._routers.current
            try:
                seconds_left = retries.time_left(time.monotonic())
                answer = await self._send(router, method, request, seconds_left, metadata)
                retries.on_admitted()
                return answer
            except SluiceError as failure:
                error = failure
            await asyncio.sleep(self._routers.on_failure(router, error, retries))
            self._routers.check_open()
            requests.set_engine_deaths(request, retries.engine_deaths)

    async def call_once(self, method: Method, request: Any, timeout: float | None) -> Any:
        router = self._routers.current
        limit = self._routers.begin(timeout).timeout
        try:
            return await self._send(router, method, request, limit)
        except SluiceError as error:
            self._routers.on_only_failure(router, error)
            raise

    async def any(
        self, method: Method, request: Any, is_true: Callable[[Any], bool], timeout: float | None = None
    ) -> bool:
        return any_true(is_true, await self.call_each(method, request, timeout))

    async def unload_adapter(
        self, catalog: AdapterCatalog[T], adapter_id: str, timeout: float | None, metadata: Metadata = ()
    ) -> list[T]:
        request = catalog.unload_request(**{f"{catalog.name}_id": adapter_id})
        answers = await self.call_each(catalog.unload_method, request, timeout, metadata)
        return catalog.unloaded(self._routers.addresses, answers)

    async def list_adapters(
        self, catalog: AdapterCatalog[T], timeout: float | None, metadata: Metadata = ()
    ) -> list[T]:
        lists = catalog.lists(self._routers.all)
        while calls := lists.next_calls():
            lists.add(await self.call_all(catalog.list_method, calls, timeout, metadata))
        return catalog.listed(self._routers.addresses, lists)

    async def call_each(
        self, method: Method, request: Any, timeout: float | None, metadata: Metadata = ()
    ) -> list[Any]:
        return await self.call_all(method, [(router, request) for router in self._routers.all], timeout, metadata)

    async def call_all(
        self, method: Method, calls: Iterable[tuple[Router, Any]], timeout: float | None, metadata: Metadata = ()
    ) -> list[Any]:
        limit = self._routers.begin(timeout).timeout
        running = (self._send(router, method, request, limit, metadata) for router, request in calls)
        return await asyncio.gather(*running, return_exceptions=True)

    async def _send(
        self, router: Router, method: Method, request: Any, timeout: float | None, metadata: Metadata = ()
    ) -> Any:
        for tries_left in reversed(range(UPLOAD_TRIES)):
            try:
                return await self._routers.start(router, method, request, timeout, metadata)
            except (grpc.RpcError, asyncio.CancelledError) as error:
                if is_task_cancelled():
                    raise
                if tries_left and is_cut_short(request, error):
                    continue
                raise with_timeout(router.error(error), timeout) from None
        raise AssertionError("the last try returns or raises")


def _answer(router: Router, call: Any, timeout: float | None) -> Any:
    try:
        return call.result()
    except grpc.RpcError as error:
        return with_timeout(router.error(error), timeout)
