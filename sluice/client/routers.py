"""The routers that a client may ask, any of which does."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import grpc
from grpc_health.v1 import health_pb2_grpc

from sluice.client.attempts import Attempts, tells_of_router
from sluice.client.connection import (
    RESUME_SECONDS,
    Metadata,
    TlsOptions,
    call_metadata,
    choose_credentials,
    open_channel,
)
from sluice.client.errors import Cancelled, SluiceError
from sluice.v1 import admin_pb2_grpc, generation_pb2_grpc


class Router:
    """One address: its channel, and a stub for each service. `api` is grpc or grpc.aio."""

    def __init__(self, api: Any, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.address = address
        self.channel = open_channel(api, address, credentials)
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.models: Any = admin_pb2_grpc.ModelServiceStub(self.channel)
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)


Method = Callable[[Router], Any]
"""Finds the method to call, such as `lambda router: router.generation.Generate`."""


class Routers:
    """All of them. Calls go to `current`: one at random, until it fails. Options are those of `ClientOptions`.

    Raises ValueError; OSError for a PEM file that cannot be read.
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
            raise ValueError("addresses is empty, must name a router at least")
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
        """The one in use."""
        return self.all[self._current]

    def start(self, router: Router, method: Method, request: Any, timeout: float | None) -> Any:
        """The call of a stream, or any of grpc.aio."""
        call = method(router)(request, timeout=timeout, metadata=self.metadata)
        with self._lock:
            self._open.add(call)
        return call

    def close(self) -> None:
        """Cancel what `start` returned and still runs: not every version of grpc.aio does so itself."""
        self.closed = True
        with self._lock:
            calls = list(self._open)
        for call in calls:
            call.cancel()

    def leave(self, router: Router) -> None:
        """It failed: the next one is in use, unless another call has moved on already."""
        if self.current is router:
            self._current = (self._current + 1) % len(self.all)

    def failed(self, router: Router, error: SluiceError, attempts: Attempts) -> float:
        """Seconds to wait before the next attempt, maybe at another router. Raises the error where there is none."""
        if tells_of_router(error):
            self.leave(router)
        self.check_open()
        return attempts.failed(error, time.monotonic())

    def check_open(self) -> None:
        """Raises Cancelled once the client is closed, which is nothing to recover from."""
        if self.closed:
            raise Cancelled("the client is closed")

    def attempts(self, timeout: float | None) -> Attempts:
        """For a request that begins now; a timeout of None is the client's. Raises Cancelled once it is closed."""
        self.check_open()
        limit = self._timeout if timeout is None else timeout
        now = time.monotonic()
        return Attempts(len(self.all), limit, self._retry_timeout, self._resume_timeout, now, self._answered)


def any_says(yes: Callable[[Any], bool], answers: Sequence[Any]) -> bool:
    """Whether one of all routers does. Raises the first error where nobody answered."""
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if len(errors) == len(answers):
        raise errors[0]
    return any(yes(answer) for answer in answers if not isinstance(answer, BaseException))
