"""The routers of a client: interchangeable, one is in use at a time."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import grpc
from grpc_health.v1 import health_pb2_grpc

from sluice.client.connection import (
    RESUME_SECONDS,
    Metadata,
    TlsOptions,
    call_metadata,
    choose_credentials,
    open_channel,
)
from sluice.client.errors import Cancelled, SluiceError
from sluice.client.retries import Retries, is_router_failure
from sluice.v1 import admin_pb2_grpc, generation_pb2_grpc


class Router:
    """The channel to one address, with a stub for each service. `api` is grpc or grpc.aio."""

    def __init__(self, api: Any, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.address = address
        self.channel = open_channel(api, address, credentials)
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.models: Any = admin_pb2_grpc.ModelServiceStub(self.channel)
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)


Method = Callable[[Router], Any]
"""Selects the method to call, such as `lambda router: router.generation.Generate`."""


class Routers:
    """All routers. Calls go to `current`, which is chosen at random and kept until it fails.

    The options are those of `ClientOptions`. Raises ValueError; OSError for an unreadable PEM file.
    """

    def __init__(
        self,
        api: Any,
        addresses: str | Sequence[str],
        *,
        timeout: float | None = None,
        retry_timeout: float = 0.0,
        resume_timeout: float = RESUME_SECONDS,
        tls: TlsOptions | None = None,
        token: str | None = None,
        tenant: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
    ) -> None:
        self.addresses = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self.addresses:
            raise ValueError("addresses is empty, must name at least one router")
        self.metadata = call_metadata(token, tenant, metadata)
        self.closed = False
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._open: WeakSet[Any] = WeakSet()
        self._timeout = timeout
        self._retry_timeout = retry_timeout
        self._resume_timeout = resume_timeout
        found = choose_credentials(tls, credentials)
        self.all = [Router(api, address, found) for address in self.addresses]
        self._current = random.randrange(len(self.all))

    @property
    def current(self) -> Router:
        return self.all[self._current]

    def start(self, router: Router, method: Method, request: Any, timeout: float | None) -> Any:
        """Start a call of a stream, or any call of grpc.aio."""
        call = method(router)(request, timeout=timeout, metadata=self.metadata)
        with self._lock:
            self._open.add(call)
        return call

    def close(self) -> None:
        """Cancel the open calls of `start`: not every version of grpc.aio does so when its channel closes."""
        self.closed = True
        with self._lock:
            calls = list(self._open)
        for call in calls:
            call.cancel()

    def skip(self, router: Router) -> None:
        """Switch to the next router after a failure, unless another call has switched already."""
        if self.current is router:
            self._current = (self._current + 1) % len(self.all)

    def on_failure(self, router: Router, error: SluiceError, retries: Retries) -> float:
        """Seconds to wait before the next attempt, which may use another router. Raises `error` if there is none."""
        if is_router_failure(error):
            self.skip(router)
        self.check_open()
        return retries.on_failure(error, time.monotonic())

    def check_open(self) -> None:
        """Raises Cancelled if the client is closed."""
        if self.closed:
            raise Cancelled("the client is closed")

    def begin(self, timeout: float | None) -> Retries:
        """For a new request; None: the default timeout. Raises Cancelled if the client is closed."""
        self.check_open()
        limit = self._timeout if timeout is None else timeout
        now = time.monotonic()
        return Retries(len(self.all), limit, self._retry_timeout, self._resume_timeout, now, self._answered)


def any_yes(yes: Callable[[Any], bool], answers: Sequence[Any]) -> bool:
    """Whether any router's answer satisfies `yes`. Raises the first error if none answered."""
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if len(errors) == len(answers):
        raise errors[0]
    return any(yes(answer) for answer in answers if not isinstance(answer, BaseException))
